"""Waits for a condition, and names it in the error after a timeout."""

import time
from collections.abc import Callable
from typing import TypeVar

from spotune_testcluster.errors import DidNotStartError

T = TypeVar("T")


def wait_for(what: str, seconds: float, look: Callable[[], T | None], every: float = 0.05) -> T:
    """Call `look` until it returns a true value, and return that value.

    Args:
        what: Name of the condition, for the error message.
        seconds: The timeout.
        look: The condition; None and False mean "not yet".
        every: Seconds between two calls.

    Raises:
        DidNotStartError: The timeout expired.
    """
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise DidNotStartError(f"{what}: not seen within {seconds:.0f} s")
        time.sleep(every)
