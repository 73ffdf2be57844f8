"""Waits for a condition, and names it in the error after a timeout."""

import time
from collections.abc import Callable
from typing import TypeVar

from spotune_testcluster.errors import DidNotStartError

T = TypeVar("T")

_SHORTEST_SECONDS = 0.05
_LONGEST_SECONDS = 0.5


def wait_for(what: str, seconds: float, look: Callable[[], T | None], every: float | None = None) -> T:
    """Call `look` until it returns a true value, and return that value.

    Args:
        what: Name of the condition, for the error message.
        seconds: The timeout.
        look: The condition; None and False mean "not yet".
        every: Seconds between two calls; None: a tenth of the time waited so far, from 0.05 to 0.5 s. Most conditions
            run kubectl, which would otherwise keep a processor busy that the pods need.

    Raises:
        DidNotStartError: The timeout expired.
    """
    began = time.monotonic()
    while True:
        found = look()
        if found:
            return found
        waited = time.monotonic() - began
        if waited > seconds:
            raise DidNotStartError(f"{what}: not seen within {seconds:.0f} s")
        time.sleep(min(max(waited / 10, _SHORTEST_SECONDS), _LONGEST_SECONDS) if every is None else every)
