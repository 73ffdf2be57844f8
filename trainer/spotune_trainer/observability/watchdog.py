"""A watchdog: ends a process that makes no progress, and writes the stacks of all its threads to the volume.

The timer runs in C (`faulthandler`) and does not need the GIL. It fires even if every thread is blocked in a
collective, on a file or on a lock. A process has only one such timer, so watchdogs must not be nested.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self


class Watchdog:
    """A context manager: ends the process with status 1 if `reset` is not called for `timeout_seconds`.

    Args:
        stacks: the file for the stacks; it stays empty unless the watchdog fires.
        timeout_seconds: longest time between two calls of `reset`.
        clock: seconds, monotonic.
    """

    def __init__(self, stacks: Path, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = stacks
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._last_reset = float("-inf")

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = self._path.open("w", encoding="utf-8")
        self.reset()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()

    def reset(self) -> None:
        """Restart the timer: the process has made progress. Cheap, since it does so at most once a second."""
        now = self._clock()
        if now - self._last_reset >= min(1.0, self._timeout_seconds / 4):
            faulthandler.dump_traceback_later(self._timeout_seconds, exit=True, file=self._stacks)
            self._last_reset = now
