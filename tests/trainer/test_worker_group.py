"""Why a worker group ended: from what its ranks wrote down, and from whom Ray lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from spotune.errors import DataError, InfrastructureError, JobError, SupersededError
from spotune.retry import FailureCause
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.failures import classify, read_failures, record_failure
from spotune_trainer.layout import GenerationLogs
from spotune_trainer.worker_group import CorruptCheckpoint, Failed, GroupEnd, Superseded, explain

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:25601")


@pytest.fixture
def logs(tmp_path: Path) -> GenerationLogs:
    return GenerationLogs(tmp_path)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (JobError("dataset: no label tokens"), FailureCause.APP_ERROR),
        (DataError("shard.00001.mds is missing"), FailureCause.DATA),
        (ZeroDivisionError("division by zero"), FailureCause.APP_ERROR),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), FailureCause.APP_ERROR),
        (torch.OutOfMemoryError("CUDA out of memory"), FailureCause.OUT_OF_MEMORY),
        (MemoryError(), FailureCause.OUT_OF_MEMORY),
        (OSError(116, "Stale file handle"), FailureCause.INFRASTRUCTURE),
        (InfrastructureError("the bucket did not answer"), FailureCause.INFRASTRUCTURE),
        (GLOO, FailureCause.COMMUNICATION),
        (distributed.DistBackendError("NCCL error"), FailureCause.COMMUNICATION),
    ],
)
def test_an_error_has_a_cause(error: Exception, cause: FailureCause) -> None:
    assert classify(error) is cause


def test_a_failure_is_written_down_with_its_traceback(logs: GenerationLogs) -> None:
    assert read_failures(logs) == []
    try:
        raise ValueError("row 7 has no labels")
    except ValueError as error:
        record_failure(logs, 2, error)
    (failure,) = read_failures(logs)
    assert (failure.rank, failure.cause, failure.kind) == (2, "appError", "ValueError")
    assert failure.message == "ValueError: row 7 has no labels"
    assert "test_worker_group.py" in failure.details


def explained(logs: GenerationLogs, errors: dict[int, Exception], lost: dict[int, str] | None = None) -> GroupEnd:
    for rank, error in errors.items():
        record_failure(logs, rank, error)
    return explain(logs, lost or {}, "Ray says so")


def test_the_users_error_says_more_than_the_complaints_of_the_others(logs: GenerationLogs) -> None:
    end = explained(logs, {0: GLOO, 1: JobError("training: the loss of step 5 is nan"), 2: GLOO})
    assert end == Failed(FailureCause.APP_ERROR, "rank 1: training: the loss of step 5 is nan")


def test_out_of_memory_says_more_than_anything(logs: GenerationLogs) -> None:
    end = explained(logs, {0: KeyError("x"), 1: torch.OutOfMemoryError("CUDA out of memory")}, {2: "ActorDiedError"})
    assert end == Failed(FailureCause.OUT_OF_MEMORY, "rank 1: OutOfMemoryError: CUDA out of memory")


def test_memory_of_a_node_that_is_used_up_is_no_lost_worker(logs: GenerationLogs) -> None:
    end = explained(logs, {0: GLOO}, {1: "OutOfMemoryError"})
    assert isinstance(end, Failed)
    assert end.cause is FailureCause.OUT_OF_MEMORY


def test_storage_says_more_than_communication(logs: GenerationLogs) -> None:
    end = explained(logs, {0: GLOO, 1: OSError(116, "Stale file handle")})
    assert isinstance(end, Failed)
    assert end.cause is FailureCause.INFRASTRUCTURE


def test_complaints_about_the_connection_alone_are_a_communication_failure(logs: GenerationLogs) -> None:
    end = explained(logs, {1: GLOO})
    assert isinstance(end, Failed)
    assert end.cause is FailureCause.COMMUNICATION
    assert end.message.startswith("rank 1: RuntimeError: [gloo")


def test_a_lost_worker_explains_the_complaints_of_the_others(logs: GenerationLogs) -> None:
    end = explained(logs, {0: GLOO}, {2: "ActorDiedError", 1: "ActorDiedError"})
    assert end == Failed(FailureCause.WORKER_LOST, "lost rank 1 (ActorDiedError), rank 2 (ActorDiedError)")


def test_a_rank_whose_guard_ended_it_hung_though_ray_calls_it_lost(logs: GenerationLogs) -> None:
    for rank in range(2):
        logs.stacks(rank).write_text("Timeout (0:30:00)!\n" if rank == 1 else "")
    end = explained(logs, {0: GLOO}, {1: "ActorDiedError"})
    assert isinstance(end, Failed)
    assert end.cause is FailureCause.HANG
    assert end.message == (f"rank 1 made no progress within retry.hangTimeout; stacks are in {logs.stacks(1)}")


def test_a_corrupt_checkpoint_is_named(logs: GenerationLogs) -> None:
    error = CorruptCheckpointError("step-00000120.gen-7", "rank-00001.safetensors has checksum 1, its manifest says 2")
    end = explained(logs, {0: error, 1: GLOO}, {1: "ActorDiedError"})
    assert end == CorruptCheckpoint("step-00000120.gen-7", str(error))


def test_a_superseded_group_says_so(logs: GenerationLogs) -> None:
    error = SupersededError("generation 3 was superseded")
    assert explained(logs, {0: error, 1: GLOO}) == Superseded("generation 3 was superseded")


def test_without_any_account_ray_is_quoted(logs: GenerationLogs) -> None:
    assert explained(logs, {}) == Failed(
        FailureCause.WORKER_LOST, "the worker group could not be started or was lost: Ray says so"
    )
