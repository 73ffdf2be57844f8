"""Ray's example of Lightning with the callback of `spotune_train`, at a pace, so that faults hit it while it trains."""

from __future__ import annotations

import time
from typing import Any

from ray_examples import lightning_images  # type: ignore[import-not-found]


def main(config: dict[str, Any]) -> None:
    """Train as the example does; each step takes `pause` seconds longer."""
    training_step = lightning_images.ImageClassifier.training_step

    def slow_step(*arguments: Any) -> Any:
        time.sleep(config["pause"])
        return training_step(*arguments)

    lightning_images.ImageClassifier.training_step = slow_step
    lightning_images.by_steps(config)
