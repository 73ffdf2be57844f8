"""The training function of examples/ray-deepspeed at a pace, so that faults hit it while it trains."""

from __future__ import annotations

import time
from typing import Any

import classify


def main(config: dict[str, Any]) -> None:
    """Train as the example does; each epoch takes `pause` seconds longer."""
    evaluate = classify.evaluate

    def evaluate_slowly(*arguments: Any) -> Any:
        time.sleep(config["pause"])
        return evaluate(*arguments)

    classify.evaluate = evaluate_slowly  # type: ignore[assignment]
    classify.train(config)
