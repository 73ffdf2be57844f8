"""The result of a worker group, from the results of its ranks and from the ranks that Ray lost."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import distributed

from spotune.errors import DataError, InfrastructureError, JobError, SupersededError
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.training.failures import (
    EvaluationMemoryError,
    classify,
    describe,
    evaluating,
    record_failure,
)
from spotune_trainer.training.task import RankExit, RankResult
from spotune_trainer.worker_group.result import (
    CorruptCheckpoint,
    Failed,
    GroupResult,
    Stopped,
    Superseded,
    Trained,
    Yielded,
    classify_exit,
)

OOM = FailureCause.OUT_OF_MEMORY
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
        (torch.OutOfMemoryError("CUDA out of memory"), OOM),
        (MemoryError(), OOM),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
            OOM,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OOM),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), OOM),
        (torch.AcceleratorError("CUDA error: out of memory"), OOM),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), FailureCause.INFRASTRUCTURE),
        (
            RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"),
            FailureCause.INFRASTRUCTURE,
        ),
        (
            torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
            FailureCause.INFRASTRUCTURE,
        ),
        (
            distributed.DistBackendError("Last error: Cuda failure 214 'uncorrectable ECC error encountered'"),
            FailureCause.INFRASTRUCTURE,
        ),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), FailureCause.APP_ERROR),
        (ValueError("uncorrectable ECC error is the title of this row"), FailureCause.APP_ERROR),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FailureCause.APP_ERROR),
        (ValueError("CUDA out of memory is the title of this row"), FailureCause.APP_ERROR),
        (OSError(116, "Stale file handle"), FailureCause.INFRASTRUCTURE),
        (InfrastructureError("the bucket did not answer"), FailureCause.INFRASTRUCTURE),
        (GLOO, FailureCause.COMMUNICATION),
        (distributed.DistBackendError("NCCL error"), FailureCause.COMMUNICATION),
    ],
)
def test_errors_are_classified_by_cause(error: Exception, cause: FailureCause) -> None:
    assert classify(error) is cause


def test_failure_file_holds_the_traceback(logs: GenerationLogs) -> None:
    try:
        raise ValueError("row 7 has no labels")
    except ValueError as error:
        record_failure(logs, describe(2, error))
    failure = files.read_json(logs.failure(2))
    assert isinstance(failure, dict)
    assert (failure["rank"], failure["cause"], failure["kind"]) == (2, "appError", "ValueError")
    assert failure["message"] == "ValueError: row 7 has no labels"
    assert "test_result.py" in failure["details"]


def classified(logs: GenerationLogs, errors: dict[int, Exception], lost: dict[int, str] | None = None) -> GroupResult:
    results = [RankResult(rank, 1, failure=describe(rank, error)) for rank, error in errors.items()]
    return classify_exit(logs, results, lost or {}, "the error of Ray")


def test_successful_group_has_the_summary_of_rank_0(logs: GenerationLogs) -> None:
    results = [RankResult(1, 0, RankExit.TRAINED, {}), RankResult(0, 0, RankExit.TRAINED, {"steps": 10})]
    assert classify_exit(logs, results, {}, "") == Trained({"steps": 10})
    assert classify_exit(logs, [RankResult(0, 0, RankExit.STOPPED, {})], {}, "") == Stopped()
    assert classify_exit(logs, [RankResult(0, 0, RankExit.YIELDED, {})], {}, "") == Yielded()


def test_rank_that_exits_without_a_result_is_lost_and_a_rank_killed_by_the_agent_is_not(logs: GenerationLogs) -> None:
    results = [
        RankResult(0, 3),
        RankResult(1, -9),
        RankResult(2, -9, killed=True),
        RankResult(3, 1, failure=describe(3, GLOO)),
        RankResult(4, -40),
    ]
    assert classify_exit(logs, results, {}, "") == Failed(
        FailureCause.WORKER_LOST, "lost rank 0 (exit status 3), rank 1 (SIGKILL), rank 4 (signal 40)"
    )


def test_application_error_takes_precedence_over_communication_errors(logs: GenerationLogs) -> None:
    result = classified(logs, {0: GLOO, 1: JobError("training: the loss of step 5 is nan"), 2: GLOO})
    assert result == Failed(FailureCause.APP_ERROR, "rank 1: training: the loss of step 5 is nan")


def test_out_of_memory_takes_precedence_over_every_other_cause(logs: GenerationLogs) -> None:
    result = classified(
        logs, {0: KeyError("x"), 1: torch.OutOfMemoryError("CUDA out of memory")}, {2: "ActorDiedError"}
    )
    assert result == Failed(FailureCause.OUT_OF_MEMORY, "rank 1: OutOfMemoryError: CUDA out of memory")


def test_out_of_memory_in_the_evaluation_says_how_many_samples_did_not_fit(logs: GenerationLogs) -> None:
    with pytest.raises(EvaluationMemoryError) as raised, evaluating(16):
        raise torch.OutOfMemoryError("CUDA out of memory")
    result = classified(logs, {0: pickle.loads(pickle.dumps(raised.value)), 1: GLOO})
    assert result == Failed(
        OOM,
        "rank 0: the evaluation of 16 samples at once ran out of memory; the next worker group evaluates 8: "
        "OutOfMemoryError: CUDA out of memory",
        evaluation_batch=16,
    )


def test_other_errors_of_the_evaluation_stay_what_they_are() -> None:
    with pytest.raises(KeyError), evaluating(16):
        raise KeyError("label")


def test_worker_killed_by_the_memory_monitor_of_ray_is_out_of_memory(logs: GenerationLogs) -> None:
    result = classified(logs, {0: GLOO}, {1: "OutOfMemoryError"})
    assert isinstance(result, Failed)
    assert result.cause is FailureCause.OUT_OF_MEMORY


def test_storage_error_takes_precedence_over_communication_errors(logs: GenerationLogs) -> None:
    result = classified(logs, {0: GLOO, 1: OSError(116, "Stale file handle")})
    assert isinstance(result, Failed)
    assert result.cause is FailureCause.INFRASTRUCTURE


def test_connection_errors_alone_are_a_communication_failure(logs: GenerationLogs) -> None:
    result = classified(logs, {1: GLOO})
    assert isinstance(result, Failed)
    assert result.cause is FailureCause.COMMUNICATION
    assert result.message.startswith("rank 1: RuntimeError: [gloo")


def test_lost_worker_takes_precedence_over_communication_errors(logs: GenerationLogs) -> None:
    result = classified(logs, {0: GLOO}, {2: "ActorDiedError", 1: "ActorDiedError"})
    assert result == Failed(FailureCause.WORKER_LOST, "lost rank 1 (ActorDiedError), rank 2 (ActorDiedError)")


def test_hang_takes_precedence_over_communication_errors(logs: GenerationLogs) -> None:
    results = [RankResult(0, 1, failure=describe(0, GLOO)), RankResult(1, 1, hung=True)]
    result = classify_exit(logs, results, {}, "")
    assert isinstance(result, Failed)
    assert result.cause is FailureCause.HANG
    assert result.message == (f"rank 1 made no progress within retry.hangTimeout; stacks are in {logs.stacks(1)}")


def test_corrupt_checkpoint_is_named(logs: GenerationLogs) -> None:
    reason = "rank-00001.safetensors has checksum 1, its manifest records 2"
    error = CorruptCheckpointError("step-00000120.gen-7", reason)
    result = classified(logs, {0: error, 1: GLOO}, {1: "ActorDiedError"})
    assert result == CorruptCheckpoint("step-00000120.gen-7", str(error))


def test_superseded_rank_makes_the_group_superseded(logs: GenerationLogs) -> None:
    error = SupersededError("generation 3 was superseded")
    assert classified(logs, {0: error, 1: GLOO}) == Superseded("generation 3 was superseded")


def test_message_of_ray_is_reported_when_no_rank_left_a_result(logs: GenerationLogs) -> None:
    assert classified(logs, {}) == Failed(
        FailureCause.WORKER_LOST, "the worker group could not be started or was lost: the error of Ray"
    )
