"""One worker group: start it by Ray Train, wait for its end, and say why it ended.

The driver retries, not Ray: every limit of Ray's own is zero, so that a `fit()` is one generation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ray.exceptions import OutOfMemoryError, RayError
from ray.train.torch import TorchConfig
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.train.v2.torch.torch_trainer import TorchTrainer

from spotune.retry import FailureCause
from spotune_trainer.failures import WorkerFailure, hung_ranks, read_failures
from spotune_trainer.layout import GenerationLogs, JobDirectory
from spotune_trainer.task import Ending, WorkerTask, train_function

# Read by Ray Train when a group starts, and handed on to its controller and workers. Every helper actor that is left
# out saves the start of a Python process.
_RAY_TRAIN_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # a lost worker is noticed in a fifth of a second instead of two
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",  # then the driver looks again how many workers there are
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the driver looks for them itself (node_watch)
    "RAY_TRAIN_METRICS_ENABLED": "0",  # the supervisor serves metrics
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers write nothing into their working directory
}

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


def run_worker_group(task: WorkerTask, world_size: int, gpus_per_worker: int, directory: JobDirectory) -> GroupEnd:
    """Run one generation on `world_size` workers until it ends."""
    for name, setting in _RAY_TRAIN_SETTINGS.items():
        os.environ.setdefault(name, setting)
    trainer = TorchTrainer(
        train_function,
        train_loop_config=asdict(task),
        torch_config=TorchConfig(backend="nccl" if gpus_per_worker else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=world_size,
            use_gpu=gpus_per_worker > 0,
            resources_per_worker={"GPU": 1} if gpus_per_worker else {"CPU": 1},
        ),
        run_config=RunConfig(
            name=f"gen-{task.generation}",
            storage_path=str(directory.ray_train),
            failure_config=FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0),
        ),
    )
    logs = directory.generation_logs(task.generation)
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        lost = _lost_ranks(error) if isinstance(error, WorkerGroupError) else {}
        return explain(logs, lost, str(error))
    except RayError as error:
        return explain(logs, {}, f"Ray's controller was lost: {error}")
    value: Any = result.return_value  # type: ignore[attr-defined]  # of Ray Train v2's Result
    match Ending(value["ending"]):
        case Ending.STOPPED:
            return Stopped()
        case Ending.LEFT:
            return Left()
        case Ending.TRAINED:
            return Trained(value["figures"])


def explain(logs: GenerationLogs, lost: Mapping[int, str], text: str) -> GroupEnd:
    """Why a group failed, from what its ranks wrote down and from whom Ray lost.

    Args:
        logs: folder of the generation.
        lost: ranks whose process or node is gone, with what Ray says about it.
        text: Ray's own account, where nobody wrote anything down.
    """
    recorded = read_failures(logs)
    for failure in recorded:
        if failure.checkpoint is not None:
            return CorruptCheckpoint(failure.checkpoint, failure.message)
        if failure.kind == "SupersededError":
            return Superseded(failure.message)
    hung = hung_ranks(logs)
    if hung:
        ranks = ", ".join(str(rank) for rank in hung)
        message = f"rank {ranks} made no progress within retry.hangTimeout; stacks are in {logs.stacks(hung[0])}"
        return Failed(FailureCause.HANG, message)
    killed = [rank for rank, reason in lost.items() if reason == OutOfMemoryError.__name__]
    if killed:
        message = f"rank {killed[0]} was ended by Ray because the memory of its node was used up"
        return Failed(FailureCause.OUT_OF_MEMORY, message)
    if lost and _first(recorded, FailureCause.OUT_OF_MEMORY) is None:
        ranks = ", ".join(f"rank {rank} ({reason})" for rank, reason in sorted(lost.items()))
        return Failed(FailureCause.WORKER_LOST, f"lost {ranks}")
    for cause in _MOST_TELLING:
        found = _first(recorded, cause)
        if found is not None:
            return Failed(cause, f"rank {found.rank}: {found.message}")
    return Failed(FailureCause.WORKER_LOST, f"the worker group could not be started or was lost: {text}")


def _first(recorded: list[WorkerFailure], cause: FailureCause) -> WorkerFailure | None:
    return next((failure for failure in recorded if failure.cause == cause), None)


def _lost_ranks(error: WorkerGroupError) -> dict[int, str]:
    """Ranks that Ray's health check found dead."""
    lost = {}
    for rank, failure in error.worker_failures.items():
        died = getattr(failure, "health_check_failure", None)
        if died is not None:
            lost[rank] = type(died).__name__
    return lost
