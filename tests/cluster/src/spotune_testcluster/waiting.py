"""Waiting for something to become true, with a name in the error when it does not."""

import time
from collections.abc import Callable
from typing import TypeVar

from spotune_testcluster.errors import DidNotStartError

T = TypeVar("T")


def wait_for(what: str, seconds: float, look: Callable[[], T | None], every: float = 0.05) -> T:
    """The first true value that `look` returns.

    Args:
        what: What is waited for, for the error's sentence.
        seconds: How long to wait at most.
        look: Called again and again; None and False mean "not yet".
        every: Seconds between two looks.

    Raises:
        DidNotStartError: It did not become true in time.
    """
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise DidNotStartError(f"{what}: not seen within {seconds:.0f} s")
        time.sleep(every)
