"""The training function of examples/own-function at a pace, so that faults hit it while it trains."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import train


def main(config: dict[str, Any]) -> None:
    """Train as the example does; each epoch takes `pause` seconds longer, until there is a file `untilFile`."""
    train_epoch, until = train.train_epoch, config.get("untilFile")

    def slow_epoch(*arguments: Any) -> Any:
        if until is None or not Path(until).exists():
            time.sleep(config["pause"])
        return train_epoch(*arguments)

    train.train_epoch = slow_epoch  # type: ignore[assignment]
    train.train(config)
