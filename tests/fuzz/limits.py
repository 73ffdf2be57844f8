"""Limits of the time and memory of one call, so that a hang and a blow-up are failures like any other."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SECONDS = 10.0
"""Of one input. The machine may be shared, and every parser takes milliseconds."""
BYTES = 2 << 30
"""Of address space in addition to what the process has, for one input."""


class TooSlowError(AssertionError):
    """A parser has not ended in time."""


@contextmanager
def limited(seconds: float = SECONDS, extra_bytes: int = BYTES) -> Iterator[None]:
    """Raise TooSlowError after this time, and MemoryError beyond this memory; to be used on the main thread.

    Args:
        seconds: wall clock.
        extra_bytes: address space in addition to the present one.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError(f"not read within {seconds:.0f} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    earlier, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra_bytes, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (earlier, hard))
        signal.signal(signal.SIGALRM, handler)
