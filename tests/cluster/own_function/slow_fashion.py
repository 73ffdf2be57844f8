"""Ray's example of Fashion MNIST with `spotune_train`, at a pace, so that faults hit it while it trains."""

from __future__ import annotations

import time
from typing import Any

from ray_examples import fashion_mnist  # type: ignore[import-not-found]


def main(config: dict[str, Any]) -> None:
    """Train as the example does; each step takes `pause` seconds longer."""
    forward = fashion_mnist.NeuralNetwork.forward

    def slow_forward(*arguments: Any) -> Any:
        time.sleep(config["pause"])
        return forward(*arguments)

    fashion_mnist.NeuralNetwork.forward = slow_forward
    fashion_mnist.by_steps(config)
