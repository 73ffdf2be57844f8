"""Notices: what a worker group is told to do by a file on the volume, and what it does about it in the time it has.

The supervisor writes one for the whole job (a request to stop, a spot notice for the head), the driver one for a
generation: leave, because a worker's node is going away (until a deadline) or because there is room for more workers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune_trainer import files

logger = logging.getLogger("spotune.worker")

_LOOK_EVERY_SECONDS = 0.5
_UNKNOWN_COMMIT_SECONDS = 5.0
"""What a commit is taken to need before there was one."""
_MARGIN_SECONDS = 3.0
"""By which a node may go before its deadline."""


@dataclass(frozen=True)
class Flags:
    """What any rank asks for; one asking is enough.

    Attributes:
        commit: save the state.
        notice: something was announced.
        stop: end the run after the commit.
        leave: end this worker group after the commit; another one goes on.
    """

    commit: bool = False
    notice: bool = False
    stop: bool = False
    leave: bool = False

    def __or__(self, other: Flags) -> Flags:
        return Flags(
            self.commit or other.commit,
            self.notice or other.notice,
            self.stop or other.stop,
            self.leave or other.leave,
        )


def write_notice(path: Path, *, seconds: float | None, reason: str, stop: bool = False, leave: bool = False) -> None:
    """Tell the workers to commit, and with `stop` or `leave` to end, within `seconds` (None: take your time)."""
    now = time.time()
    deadline = now + seconds if seconds is not None else None
    files.write_json(path, {"time": now, "deadline": deadline, "stop": stop, "leave": leave, "reason": reason})


class NoticeWatch:
    """Looks at notices now and then, and says on rank 0 what the group is to do about each, once.

    A group that is to leave until a deadline trains on for as long as its last commit still fits, so that nothing is
    lost; it commits at once, too, for the node may go earlier. Where not even one commit fits, it trains on until the
    node is gone: what was committed before is all there can be.

    Args:
        paths: files that notices are written to.
        clock: seconds, monotonic.
        now: seconds since the epoch, by which deadlines are given.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._paths = paths
        self._clock = clock
        self._now = now
        self._looked = float("-inf")
        self._asked = clock()
        self._handled: dict[Path, float] = {}
        self._leave_until: float | None = None

    def flags(self, commit_seconds: float | None) -> Flags:
        """What notices ask for after the next step; nothing while there is none.

        Args:
            commit_seconds: what a commit takes from its beginning until it is durable; None: not known.
        """
        clock = self._clock()
        step_seconds, self._asked = clock - self._asked, clock
        needed = _UNKNOWN_COMMIT_SECONDS if commit_seconds is None else commit_seconds
        wanted = Flags()
        if clock - self._looked >= _LOOK_EVERY_SECONDS:
            self._looked = clock
            for notice in self._new():
                wanted |= self._answer(notice, needed)
        # By the time of the next question another step has passed.
        reserve = 1.5 * needed + _MARGIN_SECONDS + 2 * step_seconds
        if self._leave_until is not None and self._leave_until - self._now() <= reserve:
            self._leave_until = None
            wanted |= Flags(commit=True, notice=True, leave=True)
        return wanted

    def _new(self) -> Iterator[dict[str, Any]]:
        for path in self._paths:
            notice = files.read_json(path)
            if notice is not None and notice["time"] != self._handled.get(path):
                self._handled[path] = notice["time"]
                yield notice

    def _answer(self, notice: dict[str, Any], needed: float) -> Flags:
        stop, leave = bool(notice["stop"]), bool(notice.get("leave"))
        left = notice["deadline"] - self._now() if notice["deadline"] is not None else math.inf
        if stop or (leave and left == math.inf):
            return Flags(commit=True, notice=True, stop=stop, leave=leave)
        if left < needed:
            logger.warning("%s: a commit takes %.0f s and does not fit into %.0f s", notice["reason"], needed, left)
            return Flags(notice=True)
        if leave:
            self._leave_until = notice["deadline"]
        return Flags(commit=True, notice=True)
