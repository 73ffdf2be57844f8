"""Ranks that call a training function: what is committed, resumed, exported and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotune.errors import JobError
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import choose_checkpoint, surviving_steps
from spotune_trainer.checkpoint.layout import list_checkpoints
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.training.task import RankExit
from tests.trainer.training_functions.ranks import (
    function_job,
    next_task,
    run_disturbed,
    run_generation,
    run_superseded,
    wait_for_commit,
)

pytestmark = pytest.mark.slow

STEPS = {"steps": 6, "every": 2}


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "run")


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_function_trains_and_its_last_checkpoint_is_the_model(directory: JobDirectory) -> None:
    job = function_job("adds_up", STEPS, checkpoint={"keep": 2})
    task, [(rank_exit, summary), other] = run_generation(directory, job)
    assert rank_exit is RankExit.TRAINED
    assert other == (RankExit.TRAINED, summary)
    assert {path: len(found) for path, found in content_of(directory.export).items()} == {
        "state.json": len('{"step": 6, "total": 63.0}'),
        "shards/rank-0.bin": 1000,
        "shards/rank-1.bin": 1000,
    }
    assert json.loads((directory.export / "state.json").read_text()) == {"step": 6, "total": 63.0}
    assert (summary["steps"], summary["exportStep"]) == (6, 6)
    assert summary["metrics"] == {"loss": 1 / 6, "accuracy": 63.0}
    assert [found.name.step for found in list_checkpoints(directory.checkpoints)] == [4, 6]
    steps = list(files.read_lines(task.logs.steps))
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[1]["metrics"] == {"loss": 0.5, "accuracy": 9.0}
    assert steps[1]["loss"] == 0.5
    events = [event["event"] for event in files.read_lines(task.logs.events)]
    assert events == ["committed", "committed", "committed", "exported"]
    progress = files.read_json(task.logs.progress)
    assert progress is not None
    assert progress["lastCheckpoint"]["step"] == 6
    assert progress["phase"] == "Exporting"
    assert (progress["evalScores"], progress["evalStep"]) == ({"accuracy": 63.0}, 6)
    assert "rank 1 of 2 ends at 63.0" in task.logs.worker(1).read_text()


def test_after_a_lost_rank_another_group_continues_with_the_same_result(
    directory: JobDirectory, tmp_path: Path
) -> None:
    undisturbed = JobDirectory(tmp_path / "undisturbed")
    run_generation(undisturbed, function_job("adds_up", STEPS))
    job = function_job("adds_up", {**STEPS, "killAt": 5})
    _, results = run_generation(directory, job)
    assert results[1] == -9
    assert isinstance(results[0], RuntimeError)
    task, results = run_generation(directory, job)
    assert [result[0] for result in results] == [RankExit.TRAINED] * 2
    assert task.restore == "step-00000004.gen-1"
    assert content_of(directory.export) == content_of(undisturbed.export)
    assert [line["step"] for line in surviving_steps(directory)] == [1, 2, 3, 4, 5, 6]


def test_another_number_of_workers_continues(directory: JobDirectory) -> None:
    job = function_job("adds_up", {**STEPS, "killAt": 5})
    run_generation(directory, job)
    task, [(rank_exit, _)] = run_generation(directory, job, world_size=1)
    assert rank_exit is RankExit.TRAINED
    assert task.restore == "step-00000004.gen-1"
    assert json.loads((directory.export / "state.json").read_text())["total"] == 3 * (1 + 2 + 3 + 4) + 5 + 6


def test_a_notice_that_the_agent_of_another_node_has_seen_first_ends_the_group(directory: JobDirectory) -> None:
    def notice_later() -> None:
        wait_for_commit(directory)
        write_notice(directory.generation_logs(1).agent_notice, seconds=60.0, reason="a spot notice", leave=True)

    job = function_job("adds_up", {"steps": 100_000, "every": 100})
    _, results = run_disturbed(directory, job, notice_later, nodes=2)
    assert [result[0] for result in results] == [RankExit.YIELDED] * 2


@pytest.mark.parametrize(("stop", "expected"), [(True, RankExit.STOPPED), (False, RankExit.YIELDED)])
def test_a_notice_ends_the_group_after_its_next_checkpoint(
    directory: JobDirectory, stop: bool, expected: RankExit
) -> None:
    job = function_job("adds_up", {"steps": 100_000, "every": 100})

    def notice_later() -> None:
        wait_for_commit(directory)
        path = directory.notice if stop else directory.generation_logs(1).notice
        write_notice(path, seconds=60.0, reason="a test", stop=stop, leave=not stop)

    task, results = run_disturbed(directory, job, notice_later)
    assert [result[0] for result in results] == [expected] * 2
    checkpoint = choose_checkpoint(directory).checkpoint
    assert checkpoint is not None
    last = list(files.read_lines(task.logs.steps))[-1]
    assert last["step"] == checkpoint.name.step, "no step after the last checkpoint is lost"


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("reports_nothing", JobError, "training.function returned and has saved no checkpoint"),
        ("opens_a_missing_file", JobError, "training.function raised FileNotFoundError"),
        ("validates", JobError, "calls ray.train.report with validation, which is not supported: omit it"),
        ("reports_metrics_only", JobError, "pass one to ray.train.report, or call spotune_train.checkpoint.save"),
        ("raises", ValueError, "the learning rate is a word"),
        ("asks_for_ray_data", JobError, "asks for a shard of Ray Data, which jobs do not have: read the data"),
        ("is_missing", JobError, "training.function: functions:is_missing cannot be imported (AttributeError"),
    ],
)
def test_what_is_wrong_is_named(directory: JobDirectory, function: str, error: type[Exception], message: str) -> None:
    task, results = run_generation(directory, function_job(function, {}), world_size=1)
    assert isinstance(results[0], error)
    assert message in str(results[0])
    failure = files.read_json(task.logs.failure(0))
    assert failure is not None
    assert message in failure["message"]
    assert failure["cause"] == "appError"
    assert not directory.export.exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("returns_early_on_rank_1", "all ranks have to report and save the same steps"),
        ("saves_a_forbidden_name_on_rank_1", "saved a file manifest.json, a name that checkpoints use: rename it"),
    ],
)
def test_an_error_of_one_rank_ends_all(directory: JobDirectory, function: str, message: str) -> None:
    _, results = run_generation(directory, function_job(function, {}))
    assert all(isinstance(result, JobError) and message in str(result) for result in results)
    assert list(directory.checkpoints.glob("*/manifest.json")) == []


def test_folders_behind_links_are_saved(directory: JobDirectory) -> None:
    run_generation(directory, function_job("saves_links", {}), world_size=1)
    assert content_of(directory.export) == {"linked/file": b"content", "file": b"content"}


def test_a_killed_export_is_made_again(directory: JobDirectory) -> None:
    job = function_job("adds_up", STEPS)
    run_generation(directory, job)
    directory.export.rename(directory.export.with_name(".export.12345678"))  # a kill between two renames
    _, [(rank_exit, _), _] = run_generation(directory, job)
    assert rank_exit is RankExit.TRAINED
    assert [path.name for path in directory.root.glob("*export*")] == ["export"]


def test_a_damaged_checkpoint_is_refused_by_all_ranks(directory: JobDirectory) -> None:
    job = function_job("adds_up", {**STEPS, "killAt": 5})
    run_generation(directory, job)
    damaged = directory.checkpoints / "step-00000004.gen-1" / "shards" / "rank-1.bin"
    damaged.write_bytes(bytes([7]) * 1000)
    _, results = run_generation(directory, job)
    assert all(isinstance(result, CorruptCheckpointError) for result in results)
    assert "rank-1.bin has checksum" in str(results[0])


def test_a_group_that_a_later_one_has_superseded_commits_nothing(directory: JobDirectory) -> None:
    job = function_job("adds_up", {"steps": 100_000, "every": 100})

    results = run_superseded(directory, job)
    assert [type(result).__name__ for result in results] == ["SupersededError"] * 2
    superseded_at = (directory.generations / "0000002").stat().st_mtime
    late = [path for path in directory.checkpoints.glob("*/manifest.json") if path.stat().st_mtime > superseded_at + 1]
    assert late == []


def test_ray_train_describes_the_worker_group(directory: JobDirectory) -> None:
    run_generation(directory, function_job("collects", {}))
    for rank in range(2):
        assert json.loads((directory.export / f"rank-{rank}.json").read_text()) == {
            "name": "own",
            "rank": rank,
            "localRank": rank,
            "worldSize": 2,
            "device": "cpu",
            "fromRankZero": {"rank": 0},
            "isMainThread": True,
        }


def test_plan_of_a_function_says_who_decides(directory: JobDirectory) -> None:
    task = next_task(directory, function_job("adds_up", STEPS))
    assert task.has_function
    assert task.plan["reason"] == "training.function decides how it trains"


def test_a_changed_function_is_refused_once_there_are_checkpoints(directory: JobDirectory) -> None:
    run_generation(directory, function_job("adds_up", STEPS))
    with pytest.raises(JobError, match="holds checkpoints of another model, data set or training"):
        next_task(directory, function_job("raises", {}))


def test_the_argument_may_change(directory: JobDirectory) -> None:
    run_generation(directory, function_job("adds_up", {**STEPS, "killAt": 5}))
    _, [(rank_exit, summary), _] = run_generation(directory, function_job("adds_up", {"steps": 8, "every": 2}))
    assert rank_exit is RankExit.TRAINED
    assert summary["steps"] == 8
