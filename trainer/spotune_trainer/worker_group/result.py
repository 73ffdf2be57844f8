"""Results of a worker group, the interfaces of what runs one, and how results of ranks become that of the group."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spotune.retry import FailureCause
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.training.task import RankExit, RankFailure, RankResult, WorkerTask
from spotune_trainer.worker_group.node_state import NodeGroup

_RAY_OUT_OF_MEMORY = "OutOfMemoryError"
"""Class of Ray's error for an agent that it killed because its node ran out of memory."""

# Most informative first: after one rank's error the others fail with communication errors.
_CAUSES_BY_PRIORITY = (
    FailureCause.OUT_OF_MEMORY,
    FailureCause.HANG,
    FailureCause.APP_ERROR,
    FailureCause.DATA,
    FailureCause.INFRASTRUCTURE,
    FailureCause.COMMUNICATION,
)


@dataclass(frozen=True)
class Trained:
    """The group trained to the end; the summary of the run."""

    summary: dict[str, Any]


@dataclass(frozen=True)
class Stopped:
    """The group committed and stopped, because the run is to stop."""


@dataclass(frozen=True)
class Yielded:
    """The group committed and exited, so that another group continues."""


@dataclass(frozen=True)
class Superseded:
    """A later generation has started; this driver must exit."""

    message: str


@dataclass(frozen=True)
class CorruptCheckpoint:
    """The checkpoint to start from is corrupt."""

    checkpoint: str
    message: str


@dataclass(frozen=True)
class Failed:
    """The group failed; the retry policy decides what follows.

    Attributes:
        cause: for the retry policy.
        message: for users.
        evaluation_batch: samples of the evaluation batch that ran out of memory; None if something else failed.
    """

    cause: FailureCause
    message: str
    evaluation_batch: int | None = None


GroupResult = Trained | Stopped | Yielded | Superseded | CorruptCheckpoint | Failed


@dataclass(frozen=True)
class FoundGroup:
    """A worker group of an earlier driver.

    Attributes:
        task: of its generation.
        world_size: number of its ranks.
        found: of these, the ranks on nodes that have an agent with a driver again.
        has_failed: whether one of them has failed, so that the group ends.
    """

    task: WorkerTask
    world_size: int
    found: int
    has_failed: bool

    @property
    def is_complete(self) -> bool:
        """Whether all of its ranks are found."""
        return self.found == self.world_size


def found_group(parts: Sequence[NodeGroup]) -> FoundGroup | None:
    """The group of which these are parts; None without any."""
    if not parts:
        return None
    ranks = {place.rank for part in parts for place in part.placements}
    world_size = parts[0].placements[0].world_size
    return FoundGroup(parts[0].task, world_size, len(ranks), any(part.has_failed for part in parts))


@dataclass(frozen=True)
class Slots:
    """Number of workers that the cluster can run.

    Attributes:
        nodes: slots of nodes that are alive and not draining.
        ready: of these, slots of nodes whose agent is ready.
        imported: of these, slots of nodes on which ranks start without importing modules first.
    """

    nodes: int
    ready: int
    imported: int


class NodeAgents(Protocol):
    """State of a cluster's nodes (see `agent_pool.AgentPool`)."""

    def draining(self) -> Mapping[str, float]:
        """Draining nodes, each with its deadline in seconds since the epoch (0: no deadline)."""

    def ensure(self, gpus: bool) -> Slots:
        """Start an agent on every node that is not draining."""

    def occupied(self) -> set[str]:
        """Nodes that run ranks of the current group."""

    def unfit_nodes(self) -> list[dict[str, Any]]:
        """Nodes that are left out: `node`, `boot`, `reason`, `since` (unix time) and `inUse`."""

    def leave_out(self, rank: int, reason: str, at_least: int) -> bool:
        """Leave out the node of a rank, if slots for `at_least` workers are ready without it; returns whether."""


class WorkerGroupRunner(NodeAgents, Protocol):
    """A cluster that runs worker groups."""

    def worker_memory_bytes(self, workers: int, gpus: bool) -> int:
        """Memory of one of `workers` workers, in bytes."""

    def run_group(self, task: WorkerTask, world_size: int) -> GroupResult:
        """Run one generation on `world_size` workers; returns when all have exited."""

    def find_group(self, generation: int) -> FoundGroup | None:
        """What is known of a generation that an earlier driver has started; None: nothing."""

    def adopt_group(self, group: FoundGroup) -> GroupResult:
        """Wait for a complete group that was found; returns when all of its workers have exited."""

    def kill_ranks(self) -> None:
        """End all workers of earlier drivers."""


def classify_exit(
    logs: GenerationLogs, results: Sequence[RankResult], lost: Mapping[int, str], ray_error: str
) -> GroupResult:
    """The result of a group, from those of its ranks.

    Args:
        logs: folder of the generation.
        results: of the ranks whose node agent replied.
        lost: ranks whose node or agent died, with the class of Ray's error.
        ray_error: message of Ray, used if there is no better one.
    """
    if results and not lost and not any(result.status for result in results):
        return _common_exit(results)
    failures = [result.failure for result in results if result.failure is not None]
    for failure in failures:
        if failure.checkpoint is not None:
            return CorruptCheckpoint(failure.checkpoint, failure.message)
        if failure.kind == "SupersededError":
            return Superseded(failure.message)
    hung = [result.rank for result in results if result.hung]
    if hung:
        ranks = ", ".join(str(rank) for rank in hung)
        message = f"rank {ranks} made no progress within retry.hangTimeout; stacks are in {logs.stacks(hung[0])}"
        return Failed(FailureCause.HANG, message)
    killed = [rank for rank, reason in lost.items() if reason == _RAY_OUT_OF_MEMORY]
    if killed:
        message = f"rank {killed[0]} was killed by Ray because its node ran out of memory"
        return Failed(FailureCause.OUT_OF_MEMORY, message)
    gone = dict(lost) | {
        result.rank: _status(result.status)
        for result in results
        if result.status and not (result.failure or result.killed)
    }
    gone |= {failure.rank: failure.message for failure in failures if failure.cause == FailureCause.WORKER_LOST}
    if gone and _first(failures, FailureCause.OUT_OF_MEMORY) is None:
        ranks = ", ".join(f"rank {rank} ({reason})" for rank, reason in sorted(gone.items()))
        return Failed(FailureCause.WORKER_LOST, f"lost {ranks}")
    for cause in _CAUSES_BY_PRIORITY:
        found = _first(failures, cause)
        if found is not None:
            return Failed(cause, f"rank {found.rank}: {found.message}", found.evaluation_batch)
    return Failed(FailureCause.WORKER_LOST, f"the worker group could not be started or was lost: {ray_error}")


def _common_exit(results: Sequence[RankResult]) -> GroupResult:
    """Result of a group without failures. All ranks exited for the same reason; rank 0 has the summary."""
    first = min(results, key=lambda result: result.rank)
    match first.exit:
        case RankExit.STOPPED:
            return Stopped()
        case RankExit.YIELDED:
            return Yielded()
        case RankExit.TRAINED:
            return Trained(first.summary or {})
    return Failed(FailureCause.APP_ERROR, "all ranks ended without a result: does the job's own code call os._exit?")


def _first(failures: Sequence[RankFailure], cause: FailureCause) -> RankFailure | None:
    return next((failure for failure in failures if failure.cause == cause), None)


def _status(status: int) -> str:
    """An exit status for messages: the name of a signal, or the number. Real-time signals have no names."""
    if status >= 0:
        return f"exit status {status}"
    return signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
