"""Limits of the time and memory of one call, so that a hang and a blow-up are failures like any other."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

CPU_SECONDS = 10.0
"""Processor time of one input. Every parser takes milliseconds."""
SECONDS = 60.0
"""Time of one input with its waits. Other programs may use the machine, so this limit is generous."""
BYTES = 2 << 30
"""Of address space in addition to what the process has, for one input."""


class TooSlowError(AssertionError):
    """A parser has not ended in time."""


@contextmanager
def limited(cpu_seconds: float = CPU_SECONDS, seconds: float = SECONDS, extra_bytes: int = BYTES) -> Iterator[None]:
    """Raise TooSlowError after either time, and MemoryError beyond this memory; to be used on the main thread.

    Args:
        cpu_seconds: processor time of this process, with all threads.
        seconds: wall clock.
        extra_bytes: address space in addition to the present one.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        limit = f"{cpu_seconds:g} s of processor time" if number == signal.SIGPROF else f"{seconds:g} s"
        raise TooSlowError(f"not read within {limit}")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    earlier, hard = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (earlier, hard))
        for number, handler in handlers.items():
            signal.signal(number, handler)
