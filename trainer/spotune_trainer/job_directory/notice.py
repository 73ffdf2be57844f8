"""Notices: files on the volume that ask a worker group to commit and perhaps to leave, and the group's reaction.

The supervisor writes a notice for the whole job, after a request to stop or a spot notice for the head. The driver
writes one for a generation that is to leave: with a deadline if a worker's node is about to be lost, or without one to
restart with more workers. While there is no driver, the agent of a node writes one if its pod ends, or after some
minutes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spotune.errors import StoppedError
from spotune.resize.times import seconds_before_deadline
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory

logger = logging.getLogger("spotune.worker")

_POLL_SECONDS = 0.5
_UNKNOWN_COMMIT_SECONDS = 5.0
"""Assumed duration of a commit before the first one."""


@dataclass(frozen=True)
class Flags:
    """Actions after a step. The ranks combine theirs with `|`, so one rank suffices to request one.

    Attributes:
        commit: commit a checkpoint.
        notice: a notice was read; recorded in the ledger.
        stop: end the run after the commit.
        leave: end this worker group after the commit; another group continues.
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


def write_notice(
    path: Path,
    *,
    seconds: float | None,
    reason: str,
    stop: bool = False,
    leave: bool = False,
    commit_within_seconds: float = 0.0,
) -> None:
    """Ask the workers to commit within `seconds` (None: without a deadline), and to end with `stop` or `leave`.

    A group that leaves without a deadline waits up to `commit_within_seconds` for a commit that is due anyway.
    """
    now = time.time()
    deadline = now + seconds if seconds is not None else None
    notice = {"time": now, "deadline": deadline, "stop": stop, "leave": leave, "reason": reason}
    files.write_json(path, {**notice, "commitWithin": commit_within_seconds})


@dataclass(frozen=True)
class Notice:
    """A notice as it was written; times are Unix times. `deadline` None: there is none."""

    time: float
    deadline: float | None
    stop: bool
    leave: bool
    reason: str
    commit_within: float


def read_notice(path: Path) -> Notice | None:
    """The notice in a file; None if there is none.

    Raises:
        UnreadableFileError: the file was edited, or is damaged.
    """
    value = files.read_json(path)
    if value is None:
        return None
    with files.reading(path):
        return Notice(
            time=float(value["time"]),
            deadline=None if value["deadline"] is None else float(value["deadline"]),
            stop=bool(value["stop"]),
            leave=bool(value.get("leave")),
            reason=str(value["reason"]),
            commit_within=float(value.get("commitWithin") or 0.0),
        )


def is_stop_requested(directory: JobDirectory) -> bool:
    """Whether a notice asks the workers of the job to commit and end the run."""
    notice = read_notice(directory.notice)
    return notice is not None and notice.stop


def raise_if_stopped(directory: JobDirectory) -> None:
    """To be called only while no group runs: there is nothing to commit.

    Raises:
        StoppedError: a notice asks the run to stop.
    """
    if is_stop_requested(directory):
        raise StoppedError(
            "stopped on request while waiting for workers; the same command resumes from the last commit"
        )


class NoticeWatch:
    """Polls notices on a rank and returns the group's actions, once for each notice.

    A group that has to leave by a deadline commits at once, because the node may be lost earlier. Then it trains on for
    as long as a last commit still fits before the deadline. If not even one commit fits, the group trains on until the
    node is lost and resumes from an earlier commit. A group that leaves without a deadline may wait a little for a
    commit that is due, and for the end of one that is pending.

    Args:
        paths: files that notices are written to.
        clock: seconds, monotonic.
        now: Unix time in seconds, the unit of deadlines.
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
        self._last_poll = float("-inf")
        self._last_call = clock()
        self._handled: dict[Path, float] = {}
        self._leave_until: float | None = None
        self._leave_with_commit_until: float | None = None

    def flags(self, commit_seconds: float | None, *, is_due: bool = False, is_pending: bool = False) -> Flags:
        """Actions that notices require after the next step; call once a step.

        Args:
            commit_seconds: duration of a commit until it is durable; None if unknown.
            is_due: whether there is a commit after the next step in any case.
            is_pending: whether an earlier commit is not durable yet.
        """
        clock = self._clock()
        step_seconds, self._last_call = clock - self._last_call, clock
        needed = _UNKNOWN_COMMIT_SECONDS if commit_seconds is None else commit_seconds
        flags = Flags()
        if clock - self._last_poll >= _POLL_SECONDS:
            self._last_poll = clock
            for notice in self._new():
                flags |= self._answer(notice, needed)
        reserve = seconds_before_deadline(needed, step_seconds)
        if self._leave_until is not None and self._leave_until - self._now() <= reserve:
            self._leave_until = None
            flags |= Flags(commit=True, notice=True, leave=True)
        with_commit_until = self._leave_with_commit_until
        if with_commit_until is not None and (is_due or (not is_pending and self._now() >= with_commit_until)):
            self._leave_with_commit_until = None
            flags |= Flags(commit=True, notice=True, leave=True)
        return flags

    def _new(self) -> Iterator[Notice]:
        for path in self._paths:
            notice = read_notice(path)
            if notice is not None and notice.time != self._handled.get(path):
                self._handled[path] = notice.time
                yield notice

    def _answer(self, notice: Notice, needed: float) -> Flags:
        stop, leave = notice.stop, notice.leave
        left = notice.deadline - self._now() if notice.deadline is not None else math.inf
        if leave and not stop and left == math.inf and notice.commit_within:
            self._leave_with_commit_until = notice.time + notice.commit_within
            return Flags(notice=True)
        if stop or (leave and left == math.inf):
            return Flags(commit=True, notice=True, stop=stop, leave=leave)
        if left < needed:
            logger.warning("%s: a commit takes %.0f s and does not fit into %.0f s", notice.reason, needed, left)
            return Flags(notice=True)
        if leave:
            self._leave_until = notice.deadline
        return Flags(commit=True, notice=True)
