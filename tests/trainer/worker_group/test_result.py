"""Why a worker group ended: from what its ranks wrote down, and from whom Ray lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from spotune.errors import DataError, InfrastructureError, JobError, SupersededError
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.training.failures import classify, describe, record_failure
from spotune_trainer.training.task import Ending
from spotune_trainer.worker_group.rank_process import RankEnd
from spotune_trainer.worker_group.result import (
    CorruptCheckpoint,
    Failed,
    GroupEnd,
    Left,
    Stopped,
    Superseded,
    Trained,
    explain,
)

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
    try:
        raise ValueError("row 7 has no labels")
    except ValueError as error:
        record_failure(logs, describe(2, error))
    failure = files.read_json(logs.failure(2))
    assert isinstance(failure, dict)
    assert (failure["rank"], failure["cause"], failure["kind"]) == (2, "appError", "ValueError")
    assert failure["message"] == "ValueError: row 7 has no labels"
    assert "test_worker_group.py" in failure["details"]


def explained(logs: GenerationLogs, errors: dict[int, Exception], lost: dict[int, str] | None = None) -> GroupEnd:
    ends = [RankEnd(rank, 1, failure=describe(rank, error)) for rank, error in errors.items()]
    return explain(logs, ends, lost or {}, "Ray says so")


def test_a_group_that_ends_well_has_the_figures_of_rank_0(logs: GenerationLogs) -> None:
    ends = [RankEnd(1, 0, Ending.TRAINED, {}), RankEnd(0, 0, Ending.TRAINED, {"steps": 10})]
    assert explain(logs, ends, {}, "") == Trained({"steps": 10})
    assert explain(logs, [RankEnd(0, 0, Ending.STOPPED, {})], {}, "") == Stopped()
    assert explain(logs, [RankEnd(0, 0, Ending.LEFT, {})], {}, "") == Left()


def test_a_rank_that_ends_without_a_word_is_lost_and_the_one_ended_for_it_is_not(logs: GenerationLogs) -> None:
    ends = [RankEnd(0, 3), RankEnd(1, -9), RankEnd(2, -9, killed=True), RankEnd(3, 1, failure=describe(3, GLOO))]
    assert explain(logs, ends, {}, "") == Failed(
        FailureCause.WORKER_LOST, "lost rank 0 (exit status 3), rank 1 (SIGKILL)"
    )


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


def test_a_rank_whose_guard_ended_it_hung_whatever_the_others_say(logs: GenerationLogs) -> None:
    ends = [RankEnd(0, 1, failure=describe(0, GLOO)), RankEnd(1, 1, hung=True)]
    end = explain(logs, ends, {}, "")
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
