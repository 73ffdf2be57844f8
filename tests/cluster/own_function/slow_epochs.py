"""The training function of examples/own-function at a pace, so that faults hit it while it trains."""

from __future__ import annotations

import time
from typing import Any

import train


def main(config: dict[str, Any]) -> None:
    """Train as the example does; each epoch takes `pause` seconds longer."""
    train_epoch = train.train_epoch

    def slow_epoch(*arguments: Any) -> Any:
        time.sleep(config["pause"])
        return train_epoch(*arguments)

    train.train_epoch = slow_epoch  # type: ignore[assignment]
    train.train(config)
