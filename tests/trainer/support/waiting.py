"""Waiting for what other processes do."""

import time
from collections.abc import Callable

_LOOK_EVERY_SECONDS = 0.05


def wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Wait for a condition; whether it came true in time."""
    until = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_EVERY_SECONDS)
    return True
