"""Ends a process that achieves nothing any more, with the stacks of all its threads on the volume.

The timer is one of the interpreter's C code and needs no lock of Python: it runs out though every thread waits for
ever, in a collective, for a file or for a lock. A process has only one, so guards follow one another and do not nest.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self


class HangGuard:
    """A context manager: within it the process ends with status 1 if `wind` is not called for too long.

    Args:
        stacks: file for the stacks; empty while the guard has not ended the process.
        timeout_seconds: so long may nothing be achieved.
        clock: seconds, monotonic.
    """

    def __init__(self, stacks: Path, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = stacks
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._wound = float("-inf")

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = self._path.open("w", encoding="utf-8")
        self.wind()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()

    def wind(self) -> None:
        """Something was achieved; cheap, since the timer is set anew once a second at most."""
        now = self._clock()
        if now - self._wound >= min(1.0, self._timeout_seconds / 4):
            faulthandler.dump_traceback_later(self._timeout_seconds, exit=True, file=self._stacks)
            self._wound = now
