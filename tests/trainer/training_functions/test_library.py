"""`spotune_train` in ranks: exact samples, checkpoints of any state, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import spotune_train
from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import choose_checkpoint, surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.training.task import RankExit, RankResult
from spotune_trainer.worker_group.rank_process import has_hung
from spotune_trainer.worker_group.result import Failed, classify_exit
from tests.trainer.support.runs import write_shards
from tests.trainer.training_functions.ranks import function_job, run_disturbed, run_generation, run_superseded
from tests.trainer.training_functions.test_worker import content_of

pytestmark = pytest.mark.slow

TRAINING = {"epochs": 2, "every": 3}
STEPS = 16
"""Two epochs of 37 rows, 5 in a step."""


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "run")


def library_job(function: str, config: dict[str, Any]) -> FinetuneJob:
    return function_job(function, config, module="library_functions")


def killed(tmp_path: Path, step: int) -> dict[str, Any]:
    """Configuration for a function whose rank 1 dies after a step, once."""
    return {"killAt": step, "happened": str(tmp_path / "happened")}


def test_model_and_samples_after_a_loss_are_those_of_an_undisturbed_run(
    directory: JobDirectory, tmp_path: Path
) -> None:
    undisturbed = JobDirectory(tmp_path / "undisturbed")
    _, [(rank_exit, _), _] = run_generation(undisturbed, library_job("trains", TRAINING))
    assert rank_exit is RankExit.TRAINED
    job = library_job("trains", {**TRAINING, **killed(tmp_path, 8)})
    _, results = run_generation(directory, job)
    assert results[1] == -9
    task, [(rank_exit, _), _] = run_generation(directory, job)
    assert rank_exit is RankExit.TRAINED
    assert task.restore == "step-00000006.gen-1"
    assert content_of(directory.export) == content_of(undisturbed.export)
    steps, expected = surviving_steps(directory), surviving_steps(undisturbed)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["metrics"] for line in steps] == [line["metrics"] for line in expected]
    progress = files.read_json(task.logs.progress)
    assert progress is not None
    assert (progress["totalSteps"], progress["etaSeconds"]) == (STEPS, 0.0)


def test_another_number_of_workers_trains_on_the_same_samples(directory: JobDirectory, tmp_path: Path) -> None:
    alone = JobDirectory(tmp_path / "alone")
    run_generation(alone, library_job("trains", TRAINING), world_size=1)
    job = library_job("trains", {**TRAINING, **killed(tmp_path, 8)})
    run_generation(directory, job)
    _, [(rank_exit, _)] = run_generation(directory, job, world_size=1)
    assert rank_exit is RankExit.TRAINED
    ids = [line["metrics"]["ids"] for line in surviving_steps(directory)]
    assert ids == [line["metrics"]["ids"] for line in surviving_steps(alone)]
    weights = [torch.load(each.export / "state.pt")["model"]["weight"] for each in (directory, alone)]
    torch.testing.assert_close(weights[0], weights[1])


def test_training_goes_on_while_a_checkpoint_is_copied(directory: JobDirectory) -> None:
    task, [(rank_exit, summary), _] = run_generation(
        directory, library_job("trains", {**TRAINING, "commitsWait": True, "again": True})
    )
    assert rank_exit is RankExit.TRAINED
    assert summary["exportStep"] == STEPS, "a step that was saved is not saved again"
    assert set(torch.load(directory.export / "state.pt")) == {"model", "optimizer"}
    committed = [event for event in files.read_lines(task.logs.events) if event["event"] == "committed"]
    assert [event["step"] for event in committed] == [3, 6, 9, 12, 15, 16]


@pytest.mark.parametrize("world_size", [2, 1])
def test_shards_are_loaded_by_any_number_of_workers(directory: JobDirectory, tmp_path: Path, world_size: int) -> None:
    undisturbed = JobDirectory(tmp_path / "undisturbed")
    run_generation(undisturbed, library_job("shards", {"steps": 5}))
    job = library_job("shards", {"steps": 5, **killed(tmp_path, 4)})
    run_generation(directory, job)
    task, results = run_generation(directory, job, world_size=world_size)
    assert [result[0] for result in results] == [RankExit.TRAINED] * world_size
    assert task.restore in ("step-00000003.gen-1", "step-00000004.gen-1")
    assert (directory.export / ".metadata").exists()
    found, expected = (torch.load(each.export / "whole.pt") for each in (directory, undisturbed))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0 if world_size == 2 else 1e-6)


@pytest.mark.parametrize(
    ("function", "config", "message"),
    [
        ("reports_backwards", {"step": 3}, "training.function reported step 3 after step 3: report each step once"),
        ("reports_backwards", {"step": 2}, "training.function reported step 2 after step 3: report each step once"),
        ("saves_backwards", {}, "training.function saved step 2 after step 3: save the state of the last step"),
        ("saves_two_files_of_one_name", {}, "the name state.pt is taken: choose another"),
        ("saves_a_file_outside", {}, "a file may not be named ../outside"),
        ("loads_what_it_did_not_save", {}, "has no state.pt: it was not saved by spotune_train.checkpoint.save"),
    ],
)
def test_what_is_wrong_is_named(directory: JobDirectory, function: str, config: dict[str, Any], message: str) -> None:
    _, [error] = run_generation(directory, library_job(function, config), world_size=1)
    assert isinstance(error, JobError)
    assert message in str(error)


def test_ranks_that_do_different_things_all_end(directory: JobDirectory) -> None:
    _, errors = run_generation(directory, library_job("reports_on_one_rank_and_saves_on_the_other", {}))
    assert "reported step 1 on rank 0, while other ranks did something else" in str(errors[0])
    assert "saved step 1 on rank 1, while other ranks did something else" in str(errors[1])


def test_a_commit_in_the_background_is_refused_once_a_later_group_has_started(directory: JobDirectory) -> None:
    results = run_superseded(directory, library_job("saves_until_superseded", {}))
    assert [type(result).__name__ for result in results] == ["SupersededError"] * 2


def test_a_checkpoint_that_is_copied_while_the_function_fails_counts(directory: JobDirectory) -> None:
    _, results = run_generation(directory, library_job("fails_while_a_checkpoint_is_copied", {}))
    assert [str(result) for result in results] == ["a batch is empty"] * 2
    checkpoint = choose_checkpoint(directory).checkpoint
    assert checkpoint is not None
    assert checkpoint.name.step == 1


def test_a_function_that_saves_at_a_notice_loses_nothing(directory: JobDirectory) -> None:
    def notice_later() -> None:
        logs = directory.generation_logs(1)
        while not logs.steps.exists():
            time.sleep(0.05)
        write_notice(logs.notice, seconds=60.0, reason="a test", stop=False, leave=True)

    task, results = run_disturbed(directory, library_job("leaves_at_a_notice", {}), notice_later)
    assert [result[0] for result in results] == [RankExit.YIELDED] * 2
    checkpoint = choose_checkpoint(directory).checkpoint
    assert checkpoint is not None
    assert list(files.read_lines(task.logs.steps))[-1]["step"] == checkpoint.name.step


def test_a_function_that_hangs_after_its_last_step_is_ended_with_its_stacks(directory: JobDirectory) -> None:
    config = {"hangSeconds": 100}
    job = function_job("hangs_after_the_last_step", config, "library_functions", retry={"hangTimeout": "100s"})
    task, [status] = run_generation(directory, job, world_size=1)
    assert [line["step"] for line in files.read_lines(task.logs.steps)] == [1, 2]
    result = classify_exit(task.logs, [RankResult(0, status, hung=has_hung(task.logs, 0))], {}, "")
    assert isinstance(result, Failed)
    assert result.cause is FailureCause.HANG
    assert "in hangs_after_the_last_step" in task.logs.stacks(0).read_text()


def test_transformers_trainer_continues_exactly(directory: JobDirectory, tmp_path: Path) -> None:
    undisturbed = JobDirectory(tmp_path / "undisturbed")
    run_generation(undisturbed, library_job("trains_by_transformers", {}))
    job = library_job("trains_by_transformers", killed(tmp_path, 7))
    run_generation(directory, job)
    task, results = run_generation(directory, job)
    assert [result[0] for result in results] == [RankExit.TRAINED] * 2
    assert task.restore == "step-00000004.gen-1"
    for name in ("model.safetensors", "rng_state_1.pth"):
        assert (directory.export / name).read_bytes() == (undisturbed.export / name).read_bytes(), name
    assert [line["step"] for line in surviving_steps(directory)] == list(range(1, 13))


def test_samples_of_shards_and_outside_of_a_job(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", "seq2seq")
    found = spotune_train.samples(tmp_path / "shards", 32, epochs=1)
    assert found.total_steps == found.steps_per_epoch == 3
    batches = dict(found)
    assert [len(rows) for rows in batches.values()] == [32, 32, 11]
    assert set(batches[1][0]) == {"input_ids", "labels"}
    assert sorted(sample for step in batches for sample in found.sample_ids(step)) == list(range(75))


@pytest.mark.parametrize(
    "call",
    [spotune_train.notice, spotune_train.checkpoint.latest, lambda: spotune_train.report(1)],
    ids=["notice", "latest", "report"],
)
def test_outside_of_a_job_the_error_says_how_to_start_one(call: Any) -> None:
    with pytest.raises(JobError, match=r"works in the workers of a FinetuneJob alone: set training.function"):
        call()
