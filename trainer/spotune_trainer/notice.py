"""Notices: a spot warning or a request to stop, carried from the supervisor to the workers by a file on the volume."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spotune_trainer import files

_LOOK_EVERY_SECONDS = 0.5


@dataclass(frozen=True)
class Flags:
    """What any rank asks for; one asking is enough."""

    commit: bool = False
    notice: bool = False
    stop: bool = False

    def __or__(self, other: Flags) -> Flags:
        return Flags(self.commit or other.commit, self.notice or other.notice, self.stop or other.stop)


def write_notice(path: Path, *, seconds: float, stop: bool, reason: str) -> None:
    """Tell the workers to commit within `seconds`, and with `stop` to leave after it."""
    now = time.time()
    files.write_json(path, {"time": now, "deadline": now + seconds, "stop": stop, "reason": reason})


class NoticeWatch:
    """Looks at the notice file now and then; raises its flags once for every notice."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked = float("-inf")
        self._handled: float | None = None

    def flags(self) -> Flags:
        """What a new notice asks for; nothing while there is none."""
        now = self._clock()
        if now - self._looked < _LOOK_EVERY_SECONDS:
            return Flags()
        self._looked = now
        notice = files.read_json(self._path)
        if notice is None or notice["time"] == self._handled:
            return Flags()
        self._handled = notice["time"]
        return Flags(commit=True, notice=True, stop=notice["stop"])
