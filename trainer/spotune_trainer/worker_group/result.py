"""A worker group: who runs it, how it may end, and why it did."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spotune.retry import FailureCause
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.training.task import Ending, WorkerTask
from spotune_trainer.worker_group.rank_process import RankEnd, RankFailure

_MEMORY_USED_UP = "OutOfMemoryError"
"""What Ray says of an agent that it ended because the memory of its node was used up."""

# One rank's error makes the others complain about the connection: theirs says least.
_MOST_TELLING = (
    FailureCause.OUT_OF_MEMORY,
    FailureCause.APP_ERROR,
    FailureCause.DATA,
    FailureCause.INFRASTRUCTURE,
    FailureCause.COMMUNICATION,
)


@dataclass(frozen=True)
class Trained:
    """The group trained to the end; the figures of the run."""

    figures: dict[str, Any]


@dataclass(frozen=True)
class Stopped:
    """The group committed and left, as a notice asked it to."""


@dataclass(frozen=True)
class Left:
    """The group committed and left, so that another one goes on."""


@dataclass(frozen=True)
class Superseded:
    """A later generation has started; this driver must leave."""

    message: str


@dataclass(frozen=True)
class CorruptCheckpoint:
    """What the group was to start from is corrupt."""

    checkpoint: str
    message: str


@dataclass(frozen=True)
class Failed:
    """The group ended for a cause that the retry policy judges."""

    cause: FailureCause
    message: str


GroupEnd = Trained | Stopped | Left | Superseded | CorruptCheckpoint | Failed


@dataclass(frozen=True)
class Room:
    """How many workers there is room for.

    Attributes:
        nodes: on the nodes that are alive and stay.
        ready: of these, on nodes whose agent is there.
    """

    nodes: int
    ready: int


class NodeAgents(Protocol):
    """Those on the nodes of a cluster (see `agents`)."""

    def draining(self) -> Mapping[str, float]:
        """Nodes that are going away, each with its deadline in seconds since the epoch (0: none)."""

    def muster(self, gpus: bool) -> Room:
        """Have an agent on every node that stays."""

    def occupied(self) -> set[str]:
        """Nodes that workers of the running group are on."""


class GroupAgents(NodeAgents, Protocol):
    """Those on the nodes of a cluster, who also run groups."""

    def worker_memory_bytes(self, workers: int, gpus: bool) -> int:
        """Memory of one of so many workers."""

    def run_group(self, task: WorkerTask, world_size: int) -> GroupEnd:
        """Run one generation on so many workers until it ends."""


def explain(logs: GenerationLogs, ends: Sequence[RankEnd], lost: Mapping[int, str], text: str) -> GroupEnd:
    """Why a group ended.

    Args:
        logs: folder of the generation.
        ends: how ranks ended, as far as the agents of their nodes could tell.
        lost: ranks whose node or agent is gone, with what Ray says about it.
        text: Ray's own account, where nobody else has one.
    """
    if ends and not lost and not any(end.status for end in ends):
        return _ending(ends)
    failures = [end.failure for end in ends if end.failure is not None]
    for failure in failures:
        if failure.checkpoint is not None:
            return CorruptCheckpoint(failure.checkpoint, failure.message)
        if failure.kind == "SupersededError":
            return Superseded(failure.message)
    hung = [end.rank for end in ends if end.hung]
    if hung:
        ranks = ", ".join(str(rank) for rank in hung)
        message = f"rank {ranks} made no progress within retry.hangTimeout; stacks are in {logs.stacks(hung[0])}"
        return Failed(FailureCause.HANG, message)
    killed = [rank for rank, reason in lost.items() if reason == _MEMORY_USED_UP]
    if killed:
        message = f"rank {killed[0]} was ended by Ray because the memory of its node was used up"
        return Failed(FailureCause.OUT_OF_MEMORY, message)
    gone = dict(lost) | {
        end.rank: _status(end.status) for end in ends if end.status and not (end.failure or end.killed)
    }
    if gone and _first(failures, FailureCause.OUT_OF_MEMORY) is None:
        ranks = ", ".join(f"rank {rank} ({reason})" for rank, reason in sorted(gone.items()))
        return Failed(FailureCause.WORKER_LOST, f"lost {ranks}")
    for cause in _MOST_TELLING:
        found = _first(failures, cause)
        if found is not None:
            return Failed(cause, f"rank {found.rank}: {found.message}")
    return Failed(FailureCause.WORKER_LOST, f"the worker group could not be started or was lost: {text}")


def _ending(ends: Sequence[RankEnd]) -> GroupEnd:
    """What a group came to that did not fail: all ranks say the same, rank 0 has the figures."""
    first = min(ends, key=lambda end: end.rank)
    match first.ending:
        case Ending.STOPPED:
            return Stopped()
        case Ending.LEFT:
            return Left()
        case Ending.TRAINED:
            return Trained(first.figures or {})
    raise AssertionError("a rank that ends well says what it came to")


def _first(failures: Sequence[RankFailure], cause: FailureCause) -> RankFailure | None:
    return next((failure for failure in failures if failure.cause == cause), None)


def _status(status: int) -> str:
    """An exit status for people."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
