"""Failures of ranks: an exception becomes a cause for the retry policy and a message for the user."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import distributed

from spotune.errors import DataError, InfrastructureError, JobError, SpotuneError
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.engine.determinism import NO_DETERMINISTIC_KERNEL
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.training.task import RankFailure

_OUT_OF_MEMORY_SIGNS = (
    "OutOfMemoryError",
    "MemoryError",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",  # of cuBLAS, cuDNN and cuSPARSE
    "can't allocate memory",  # of PyTorch's allocator of host memory
)
_HARDWARE_SIGNS = (  # of CUDA and NVML; other errors of CUDA may be a program's, such as "unspecified launch failure"
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "over nvlink or a hardware error",
    "CUDA-capable device(s) is/are busy or unavailable",
    "system not yet initialized",  # the fabric manager of the node does not run
    "fallen off the bus",
    "GPU is lost",
)
_GLOO_SIGNS = ("gloo", "connection closed by peer", "connection reset by peer")


class ProgramError(InfrastructureError):
    """A program that trains has failed, and the cause was read from its exit status and output.

    Attributes:
        cause: for the retry policy.
    """

    def __init__(self, cause: FailureCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause

    def __reduce__(self) -> tuple[type[ProgramError], tuple[FailureCause, str]]:
        return ProgramError, (self.cause, str(self))


class RecordedError(SpotuneError):
    """What a process that a command has started has recorded of its failure.

    Attributes:
        failure: as recorded.
    """

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def __reduce__(self) -> tuple[type[RecordedError], tuple[RankFailure]]:
        return RecordedError, (self.failure,)


class EvaluationMemoryError(SpotuneError):
    """An evaluation batch did not fit into memory.

    Attributes:
        batch_size: its number of samples.
    """

    def __init__(self, batch_size: int, reason: str) -> None:
        following = f"; the next worker group evaluates {batch_size // 2}" if batch_size > 1 else ""
        super().__init__(f"the evaluation of {batch_size} samples at once ran out of memory{following}: {reason}")
        self.batch_size = batch_size
        self.reason = reason

    def __reduce__(self) -> tuple[type[EvaluationMemoryError], tuple[int, str]]:
        return EvaluationMemoryError, (self.batch_size, self.reason)


@contextmanager
def evaluating(batch_size: int) -> Iterator[None]:
    """Evaluate batches of so many samples. If memory runs out, they have to become smaller.

    Raises:
        EvaluationMemoryError: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if classify(error) is not FailureCause.OUT_OF_MEMORY:
            raise
        raise EvaluationMemoryError(batch_size, _message(error)) from error


def classify(error: BaseException) -> FailureCause:
    """The failure cause of an exception that a rank raised."""
    if isinstance(error, ProgramError):
        return error.cause
    if isinstance(error, JobError):
        return FailureCause.DATA if isinstance(error, DataError) else FailureCause.APP_ERROR
    if isinstance(error, MemoryError | torch.OutOfMemoryError | EvaluationMemoryError):
        return FailureCause.OUT_OF_MEMORY
    if isinstance(error, OSError | InfrastructureError) or _is_of_hardware(error):
        return FailureCause.INFRASTRUCTURE
    if isinstance(error, RuntimeError) and is_out_of_memory(str(error)):
        return FailureCause.OUT_OF_MEMORY
    text = str(error).lower()
    gloo = isinstance(error, RuntimeError) and any(sign in text for sign in _GLOO_SIGNS)
    if gloo or isinstance(error, distributed.DistError):
        return FailureCause.COMMUNICATION
    return FailureCause.APP_ERROR


def is_hardware_error(text: str) -> bool:
    """Whether the message of an exception says that a GPU, or what connects GPUs, is faulty."""
    return any(sign in text for sign in _HARDWARE_SIGNS)


def _is_of_hardware(error: BaseException) -> bool:
    return isinstance(error, RuntimeError | ProgramError) and is_hardware_error(str(error))


def is_out_of_memory(text: str) -> bool:
    """Whether the message of an exception says that memory of a device or host ran out.

    PyTorch raises a plain RuntimeError for some of them, and programs print theirs.
    """
    return any(sign in text for sign in _OUT_OF_MEMORY_SIGNS)


def describe(rank: int, error: BaseException) -> RankFailure:
    """The failure of `rank` that `error` caused."""
    if isinstance(error, RecordedError):
        return error.failure
    checkpoint = error.checkpoint if isinstance(error, CorruptCheckpointError) else None
    return RankFailure(
        rank=rank,
        cause=None if checkpoint else str(classify(error)),
        kind=type(error).__name__,
        message=_message(error),
        details="".join(traceback.format_exception(error)),
        checkpoint=checkpoint,
        evaluation_batch=error.batch_size if isinstance(error, EvaluationMemoryError) else None,
        is_of_hardware=_is_of_hardware(error),
    )


def _message(error: BaseException) -> str:
    if isinstance(error, SpotuneError):
        return str(error)
    refused = re.search(rf"(\w+)[^\n\"']*? {NO_DETERMINISTIC_KERNEL}", str(error))  # torch.compile quotes the message
    if refused:
        remedy = "set it to false and execution.reproducible to none, or use another model"
        return f"execution.deterministic: {refused[1]} {NO_DETERMINISTIC_KERNEL}: {remedy}"
    return f"{type(error).__name__}: {error}"


def recorded_failure(logs: GenerationLogs, rank: int) -> RankFailure | None:
    """The failure that a process has recorded as `rank`; None if it has recorded none."""
    value = files.read_json(logs.failure(rank))
    with files.reading(logs.failure(rank)):
        return RankFailure(**value) if value is not None else None


def record_failure(logs: GenerationLogs, failure: RankFailure) -> None:
    """Write the failure beside the rank's logs, for users. The driver gets it from the node's agent instead."""
    files.write_json(logs.failure(failure.rank), asdict(failure))
