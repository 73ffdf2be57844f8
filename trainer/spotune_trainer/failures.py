"""What a worker that fails leaves behind for the driver: the cause and the text, a file a rank.

Ray says which workers died; why, only the worker itself can say. It writes that beside its logs, so that the answer
does not depend on whether an exception can be pickled or an actor is still there to be asked.
"""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import distributed

from spotune.errors import DataError, InfrastructureError, JobError, SpotuneError
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.layout import GenerationLogs

_GLOO_SIGNS = ("gloo", "connection closed by peer", "connection reset by peer")


@dataclass(frozen=True)
class WorkerFailure:
    """Why one rank failed.

    Attributes:
        cause: a `FailureCause`, or None for a cause of another kind (superseded, a corrupt checkpoint).
        kind: the exception's class.
        message: one line for people.
        details: the traceback.
        checkpoint: the checkpoint that turned out to be corrupt.
    """

    rank: int
    cause: str | None
    kind: str
    message: str
    details: str
    checkpoint: str | None = None


def classify(error: BaseException) -> FailureCause:
    """The cause of an exception raised in a worker."""
    if isinstance(error, JobError):
        return FailureCause.DATA if isinstance(error, DataError) else FailureCause.APP_ERROR
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return FailureCause.OUT_OF_MEMORY
    if isinstance(error, OSError | InfrastructureError):
        return FailureCause.INFRASTRUCTURE
    text = str(error).lower()
    gloo = isinstance(error, RuntimeError) and any(sign in text for sign in _GLOO_SIGNS)
    if gloo or isinstance(error, distributed.DistError):
        return FailureCause.COMMUNICATION
    return FailureCause.APP_ERROR


def record_failure(logs: GenerationLogs, rank: int, error: BaseException) -> None:
    """Write down why this rank fails; never raises, since the error itself matters more."""
    checkpoint = error.checkpoint if isinstance(error, CorruptCheckpointError) else None
    failure = WorkerFailure(
        rank=rank,
        cause=None if checkpoint else str(classify(error)),
        kind=type(error).__name__,
        message=str(error) if isinstance(error, SpotuneError) else f"{type(error).__name__}: {error}",
        details="".join(traceback.format_exception(error)),
        checkpoint=checkpoint,
    )
    files.write_json(_path(logs, rank), asdict(failure))


def read_failures(logs: GenerationLogs) -> list[WorkerFailure]:
    """What the ranks of a generation wrote down, in order of rank."""
    values: list[Any] = [files.read_json(path) for path in sorted(logs.root.glob("failure-rank-*.json"))]
    return [WorkerFailure(**value) for value in values]


def hung_ranks(logs: GenerationLogs) -> list[int]:
    """Ranks whose hang guard dumped their stacks and ended them."""
    dumped = [path for path in sorted(logs.root.glob("stacks-rank-*.txt")) if path.stat().st_size > 0]
    return [int(path.stem.removeprefix("stacks-rank-")) for path in dumped]


def _path(logs: GenerationLogs, rank: int) -> Any:
    return logs.root / f"failure-rank-{rank:05d}.json"
