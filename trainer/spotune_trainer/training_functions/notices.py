"""Whether a worker group has to leave, and until when: what the notices of driver, supervisor and node agent say."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from spotune_trainer.bucket.link import link_of
from spotune_trainer.job_directory.notice import read_notice
from spotune_trainer.training.task import RankExit, RankPlacement, WorkerTask

_POLL_SECONDS = 0.5


class NoticeReader:
    """Reads notices at most twice a second.

    Args:
        notices: the files.
        clock: seconds, monotonic.
    """

    def __init__(self, notices: Sequence[Path], clock: Callable[[], float]) -> None:
        self._notices = notices
        self._clock = clock
        self._last_poll = float("-inf")
        self._found: tuple[RankExit | None, float | None] = None, None

    def read(self) -> tuple[RankExit | None, float | None]:
        """What `read_notices` returns, or has returned within the last half second."""
        now = self._clock()
        if now - self._last_poll >= _POLL_SECONDS:
            self._last_poll, self._found = now, read_notices(self._notices)
        return self._found


def notices_of(task: WorkerTask) -> tuple[Path, ...]:
    """The files that ask the worker group of a task to leave."""
    return task.job_directory.notice, task.logs.notice, task.logs.agent_notice


def notices_read_by(task: WorkerTask, place: RankPlacement) -> tuple[Path, ...]:
    """The notices that a rank reads for its group.

    Rank 0 reads all. Where a node has a directory of its own, its first rank also reads the notice of its agent:
    without a driver nobody else learns that the node's pod ends.
    """
    if place.rank == 0:
        return notices_of(task)
    link = link_of(task.job_directory)
    has_own_directory = link is not None and link.is_of_a_node
    return (task.logs.agent_notice,) if has_own_directory and place.local_rank == 0 else ()


def read_notices(notices: Sequence[Path]) -> tuple[RankExit | None, float | None]:
    """Why the group leaves, and the seconds until it must have left.

    Returns:
        None and None without a notice. The seconds are infinite without a deadline.
    """
    rank_exit, left = None, None
    for path in notices:
        notice = read_notice(path)
        if notice is None or not (notice.stop or notice.leave):
            continue
        rank_exit = RankExit.STOPPED if notice.stop or rank_exit is RankExit.STOPPED else RankExit.YIELDED
        seconds = max(notice.deadline - time.time(), 0.0) if notice.deadline is not None else math.inf
        left = seconds if left is None else min(left, seconds)
    return rank_exit, left
