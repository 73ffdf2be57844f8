"""What driver, node agents and ranks exchange: the task of a generation, placements, and results of ranks."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from spotune.plan.checkpoint_interval import SECONDS_TO_PREEMPTION
from spotune_trainer.job_directory.layout import GenerationLogs, JobDirectory


@dataclass(frozen=True)
class RankPlacement:
    """Position of a rank in its group and on its node, and where the group meets.

    Attributes:
        rank: 0-based, over the whole group.
        local_rank: 0-based among the ranks of its node; also the index of its GPU.
        local_world_size: number of ranks on its node.
        world_size: number of ranks in the group.
        address: IP address of rank 0's node.
        port: free port on that node, for the group's rendezvous.
        node: 0-based number of its node in the group.
        nodes: number of nodes in the group.
    """

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    address: str
    port: int
    node: int = 0
    nodes: int = 1

    def environment(self) -> dict[str, str]:
        """Environment variables that torch and DeepSpeed read, as torchrun sets them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True)
class RankFailure:
    """Why one rank failed.

    Attributes:
        rank: 0-based, over the whole group.
        cause: a `FailureCause`; None if the checkpoint is corrupt.
        kind: class name of the exception.
        message: one line for users.
        details: the traceback.
        checkpoint: name of the checkpoint, if that is corrupt.
        evaluation_batch: samples of the evaluation batch that ran out of memory; None if something else failed.
        is_of_hardware: whether the error says that a GPU, or what connects GPUs, is faulty.
    """

    rank: int
    cause: str | None
    kind: str
    message: str
    details: str
    checkpoint: str | None = None
    evaluation_batch: int | None = None
    is_of_hardware: bool = False


class RankExit(StrEnum):
    """Why a rank exited that did not fail; the same on all ranks of a group."""

    TRAINED = "trained"
    """All steps are done."""
    STOPPED = "stopped"
    """Committed, then stopped: the whole run is to stop."""
    YIELDED = "yielded"
    """Committed, then exited so that another worker group can continue."""


@dataclass(frozen=True)
class RankResult:
    """How a rank ended its part in a generation.

    Attributes:
        rank: 0-based, over the whole group.
        status: exit status of the process, negative for a signal; what it would be, if the process is kept.
        exit: why it exited; None if it failed or was killed.
        summary: of the run, from rank 0 of a group that trained to the end.
        failure: why it failed, if it could report that.
        hung: its watchdog ended it.
        killed: its agent killed it, because another rank had failed.
        is_kept: its process can take part in the next generation.
    """

    rank: int
    status: int
    exit: RankExit | None = None
    summary: dict[str, Any] | None = None
    failure: RankFailure | None = None
    hung: bool = False
    killed: bool = False
    is_kept: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether something else than its agent killed it."""
        return self.status == -signal.SIGKILL and not self.killed


@dataclass(frozen=True)
class WorkerTask:
    """What the driver asks of every rank of one generation. Plain values, since it is sent to other machines.

    Attributes:
        directory: the job's folder on the volume.
        generation: number that the driver claimed for this worker group.
        restore: name of the checkpoint to start from; None to start from the beginning.
        job: the job as JSON.
        plan: the plan as JSON.
        seconds_to_preemption: mean time until a worker is preempted, estimated from this run.
        commit_seconds: how long the last commit took until it was durable; None if there was none.
        memory_copies: number of snapshots of commits that each rank keeps in shared memory of its node, 0 to 2.
        peer_copy_rate: bytes per second at which a node copies each commit to another node; 0: it does not.
    """

    directory: str
    generation: int
    restore: str | None
    job: dict[str, Any]
    plan: dict[str, Any]
    seconds_to_preemption: float = SECONDS_TO_PREEMPTION
    commit_seconds: float | None = None
    memory_copies: int = 0
    peer_copy_rate: int = 0

    @property
    def job_directory(self) -> JobDirectory:
        """The job's folder on the volume."""
        return JobDirectory(Path(self.directory))

    @property
    def logs(self) -> GenerationLogs:
        """Files that the ranks of this generation write."""
        return self.job_directory.generation_logs(self.generation)

    @property
    def has_function(self) -> bool:
        """Whether the ranks call a training function of the user."""
        return bool(self.job["spec"]["training"].get("function"))

    @property
    def has_command(self) -> bool:
        """Whether each node runs a command of the user."""
        return bool(self.job["spec"]["training"].get("command"))
