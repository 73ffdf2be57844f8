"""The driver on a simulated cluster: retries, preemption, resizing, and how an attempt ends."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest

from spotune.errors import InfrastructureError, JobError, SpotuneError, StoppedError, SupersededError
from spotune.plan.execution import MinimumPlan, resolve_minimum
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import Generation, claim
from spotune_trainer.checkpoint.layout import MANIFEST, CheckpointName
from spotune_trainer.checkpoint.writer import prune
from spotune_trainer.driver import claiming, planning
from spotune_trainer.driver import driver as driver_module
from spotune_trainer.driver.__main__ import run_attempt
from spotune_trainer.driver.driver import Driver
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.worker_group.result import CorruptCheckpoint, Failed, Stopped, Superseded, Yielded
from tests.trainer.support.checkpoints import commit_checkpoint
from tests.trainer.support.drivers import events, make_driver, status
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import (
    BROKEN,
    LOST,
    OUT_OF_MEMORY,
    SUMMARY,
    TRAINED,
    ScriptedGroup,
    SimulatedCluster,
)


def test_trained_run_writes_its_result(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10, commits=[10])])
    driver = make_driver(runs, directory, cluster)
    driver.run()
    assert cluster.sizes == [2]
    result = files.read_json(directory.result)
    assert result is not None
    assert result.items() >= SUMMARY.items()
    assert (result["exactMatch"], result["executionAccuracy"], result["restarts"]) == (None, None, 0)
    assert result["export"] == str(directory.export)
    assert result["wallSeconds"] == pytest.approx(sum(result["goodputParts"].values()))
    names = [record["event"] for record in events(driver)]
    assert names == ["generation-started", "generation-ended", "finished"]
    started = events(driver, "generation-started")[0]
    assert (started["generation"], started["restoredFrom"], started["step"], started["stepsLost"]) == (1, None, 0, 0)
    assert (started["worldSize"], started["zeroStage"], started["microBatchSize"]) == (2, 1, 4)
    assert status(directory)["phase"] == "Done"


def test_metric_that_cannot_be_imported_fails_the_job_before_waiting_for_workers(
    runs: Runs, directory: JobDirectory
) -> None:
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10, commits=[10])])
    evaluation = {"generate": True, "metrics": ["judges:length"]}
    job = runs.job(dataset={"eval": {"fraction": 0.5}}, training={"evaluation": evaluation})
    driver = Driver(directory, job, 1, cluster.dependencies())
    with pytest.raises(JobError, match=r"training.evaluation.metrics: judges:length cannot be imported"):
        driver.run()
    assert cluster.sizes == []
    assert status(directory)["phase"] == "Failed"


def test_next_group_after_a_lost_one_starts_from_the_last_commit(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster(
        [ScriptedGroup(LOST, last_step=8, commits=[5]), ScriptedGroup(TRAINED, last_step=10, commits=[10])]
    )
    driver = make_driver(runs, directory, cluster)
    driver.run()
    assert [task.restore for task in cluster.tasks] == [None, "step-00000005.gen-1"]
    assert [task.generation for task in cluster.tasks] == [1, 2]
    assert cluster.now == 0, "the first failure after new steps is retried at once"
    started = events(driver, "generation-started")[1]
    assert (started["restoredFrom"], started["step"], started["stepsLost"]) == ("step-00000005.gen-1", 5, 3)
    assert started["secondsLost"] == pytest.approx(3 * 0.08)
    assert [record["steps"] for record in events(driver, "generation-ended")] == [8, 5]
    (failure,) = events(driver, "failure")
    assert (failure["cause"], failure["step"], failure["message"]) == ("workerLost", 8, LOST.message)
    found = status(directory)
    assert found["restarts"]["workerLost"] == 1
    assert (found["resumedFromStep"], found["stepsLost"]) == (5, 3)


def test_a_commit_that_comes_during_the_plan_is_where_the_next_group_starts(
    runs: Runs, directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that were given up commit once more, and delete what was chosen."""
    cluster = SimulatedCluster([ScriptedGroup(LOST, last_step=5, commits=[4]), ScriptedGroup(TRAINED, last_step=10)])
    plan, number_of_plans = planning.plan_run, count(1)

    def plan_slowly(*arguments: Any) -> RunPlan:
        if next(number_of_plans) == 2:
            commit_checkpoint(directory, 8, 1)
            shutil.rmtree(directory.checkpoints / str(CheckpointName(4, 1)))
        return plan(*arguments)

    monkeypatch.setattr(driver_module, "plan_run", plan_slowly)
    make_driver(runs, directory, cluster).run()
    assert [task.restore for task in cluster.tasks] == [None, "step-00000008.gen-1"]


def test_a_commit_that_comes_just_before_the_claim_is_where_the_next_group_starts(
    runs: Runs, directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, after the driver has looked for the last time."""
    cluster = SimulatedCluster([ScriptedGroup(LOST, last_step=5, commits=[4]), ScriptedGroup(TRAINED, last_step=10)])
    claims = count(1)

    def claim_late(directory: JobDirectory, restored: CheckpointName | None) -> Generation:
        if next(claims) == 2:
            commit_checkpoint(directory, 8, 1)
            assert prune(directory, 1, keep=1) == ["step-00000004.gen-1"]
        return claim(directory, restored)

    monkeypatch.setattr(claiming, "claim", claim_late)
    driver = make_driver(runs, directory, cluster)
    driver.run()
    assert [(task.generation, task.restore) for task in cluster.tasks] == [(1, None), (2, "step-00000008.gen-1")]
    assert [record["generation"] for record in events(driver, "generation-started")] == [1, 2]


def test_failures_without_a_new_step_back_off_up_to_the_maximum(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([*[ScriptedGroup(LOST)] * 5, ScriptedGroup(TRAINED, last_step=10)])
    make_driver(runs, directory, cluster, backoff={"initial": "10s", "max": "30s"}).run()
    pauses = [later - earlier for earlier, later in zip(cluster.started, cluster.started[1:], strict=False)]
    assert pauses == pytest.approx([0, 10, 20, 30, 30], abs=1)


def test_job_that_always_fails_ends_at_its_limit_with_the_error_message(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(BROKEN, last_step=4, commits=[])] * 5)
    driver = make_driver(runs, directory, cluster, appFailureLimit=3)
    with pytest.raises(JobError, match=r"failed 3 times without a new step \(step 4\): rank 0: ValueError: row 7"):
        driver.run()
    assert len(cluster.tasks) == 3
    found = status(directory)
    assert found["phase"] == "Failed"
    assert "row 7 has no labels" in found["message"]
    assert found["restarts"]["appError"] == 3


def test_failures_with_new_steps_between_them_are_always_retried(runs: Runs, directory: JobDirectory) -> None:
    groups = [ScriptedGroup(BROKEN, last_step=step + 1, commits=[step]) for step in range(1, 9)]
    cluster = SimulatedCluster([*groups, ScriptedGroup(TRAINED, last_step=10)])
    make_driver(runs, directory, cluster, appFailureLimit=2).run()
    assert len(cluster.tasks) == 9


def test_failures_of_earlier_attempts_count(runs: Runs, directory: JobDirectory) -> None:
    make_driver(runs, directory, SimulatedCluster([])).ledger.append(
        "failure", cause="appError", step=0, message="earlier"
    )
    driver = make_driver(runs, directory, SimulatedCluster([ScriptedGroup(BROKEN)] * 3), appFailureLimit=2)
    with pytest.raises(JobError, match="failed 2 times"):
        driver.run()


def test_out_of_memory_halves_the_micro_batch_and_records_it(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster(
        [ScriptedGroup(OUT_OF_MEMORY, last_step=3), ScriptedGroup(OUT_OF_MEMORY), ScriptedGroup(TRAINED, last_step=10)]
    )
    make_driver(runs, directory, cluster).run()
    assert [task.plan["microBatchSize"] for task in cluster.tasks] == [4, 2, 1]
    plan = files.read_json(directory.plan)
    assert plan is not None
    assert (plan["version"], plan["microBatchSize"]) == (3, 1)
    assert [change["microBatchSize"] for change in plan["changes"]] == [[4, 2], [2, 1]]
    assert plan["changes"][0]["step"] == 3
    assert plan["requested"]["microBatchSize"] == 4


def test_out_of_memory_in_the_evaluation_halves_its_batch_and_later_drivers_know(
    runs: Runs, directory: JobDirectory
) -> None:
    failed = ScriptedGroup(replace(OUT_OF_MEMORY, evaluation_batch=16), last_step=3)
    cluster = SimulatedCluster([failed, ScriptedGroup(Stopped())])
    with pytest.raises(StoppedError):
        make_driver(runs, directory, cluster, reproducible="worldSize").run()
    cluster.groups.append(ScriptedGroup(TRAINED, last_step=10))
    make_driver(runs, directory, cluster, reproducible="worldSize").run()
    found = [(task.plan["microBatchSize"], task.plan["evaluationBatchLimit"]) for task in cluster.tasks]
    assert found == [(4, None), (4, 8), (4, 8)]


def test_out_of_memory_in_the_evaluation_of_one_sample_is_a_job_error(runs: Runs, directory: JobDirectory) -> None:
    groups = [ScriptedGroup(replace(OUT_OF_MEMORY, evaluation_batch=1), last_step=3)]
    with pytest.raises(JobError, match="out of memory at step 3 with the smallest batch"):
        make_driver(runs, directory, SimulatedCluster(groups)).run()


def test_out_of_memory_disables_optional_buffers_before_halving_micro_batch(
    runs: Runs, directory: JobDirectory
) -> None:
    cluster = SimulatedCluster([*[ScriptedGroup(OUT_OF_MEMORY)] * 3, ScriptedGroup(TRAINED, last_step=10)])

    def resolved(*arguments: Any) -> MinimumPlan:
        minimum = resolve_minimum(*arguments)
        execution = replace(minimum.execution, gathered_layers=2, whole_gradients=True)
        return replace(minimum, execution=execution)

    with patch.object(planning, "resolve_minimum", resolved):
        make_driver(runs, directory, cluster).run()
    names = ("wholeGradients", "gatheredLayers", "microBatchSize")
    assert [tuple(task.plan[name] for name in names) for task in cluster.tasks] == [
        (True, 2, 4),
        (False, 2, 4),
        (False, 0, 4),
        (False, 0, 2),
    ]


def test_out_of_memory_with_a_micro_batch_of_one_is_a_job_error(runs: Runs, directory: JobDirectory) -> None:
    driver = make_driver(runs, directory, SimulatedCluster([ScriptedGroup(OUT_OF_MEMORY)] * 3))
    with pytest.raises(JobError, match="out of memory at step 0 with the smallest batch"):
        driver.run()


def test_a_reproducible_job_keeps_its_micro_batch_and_fails_out_of_memory(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(OUT_OF_MEMORY)] * 2)
    driver = make_driver(runs, directory, cluster, reproducible="worldSize")
    with pytest.raises(JobError, match=r"out of memory .* with execution\.reproducible a smaller microBatchSize"):
        driver.run()
    assert [task.plan["microBatchSize"] for task in cluster.tasks] == [4]


def test_corrupt_checkpoint_is_skipped_and_reported_once(runs: Runs, directory: JobDirectory) -> None:
    corrupt = CorruptCheckpoint("step-00000006.gen-1", "checkpoint step-00000006.gen-1 is corrupt: rank-00000")
    cluster = SimulatedCluster(
        [
            ScriptedGroup(LOST, last_step=8, commits=[3, 6]),
            ScriptedGroup(corrupt),
            ScriptedGroup(LOST, last_step=4),
            ScriptedGroup(TRAINED, last_step=10),
        ]
    )
    driver = make_driver(runs, directory, cluster)
    driver.run()
    three, six = "step-00000003.gen-1", "step-00000006.gen-1"
    assert [task.restore for task in cluster.tasks] == [None, six, three, three]
    (skipped,) = events(driver, "checkpoint-skipped")
    assert (skipped["checkpoint"], skipped["reason"]) == (six, corrupt.message)
    assert [record["cause"] for record in events(driver, "failure")] == ["workerLost"] * 2
    assert events(driver, "generation-started")[2]["stepsLost"] == 3


def test_run_does_not_begin_again_if_its_only_checkpoint_is_corrupt(runs: Runs, directory: JobDirectory) -> None:
    corrupt = CorruptCheckpoint("step-00000003.gen-1", "checkpoint step-00000003.gen-1 is corrupt: rank-00000")
    cluster = SimulatedCluster([ScriptedGroup(LOST, last_step=4, commits=[3]), ScriptedGroup(corrupt)])
    driver = make_driver(runs, directory, cluster)
    with pytest.raises(JobError, match=r"none of the committed checkpoints can be used: step-00000003\.gen-1 "):
        driver.run()
    assert [task.restore for task in cluster.tasks] == [None, corrupt.checkpoint]
    assert (directory.checkpoints / corrupt.checkpoint).exists()


def test_torn_checkpoint_is_skipped_and_reported_once(runs: Runs, directory: JobDirectory) -> None:
    claim(directory, None)
    commit_checkpoint(directory, 3, 1)
    torn = directory.checkpoints / str(commit_checkpoint(directory, 6, 1))
    (torn / MANIFEST).write_text("{")
    cluster = SimulatedCluster([ScriptedGroup(LOST, last_step=4), ScriptedGroup(TRAINED, last_step=10)])
    driver = make_driver(runs, directory, cluster)
    driver.run()
    assert [task.restore for task in cluster.tasks] == ["step-00000003.gen-1"] * 2
    (skipped,) = events(driver, "checkpoint-skipped")
    assert skipped["checkpoint"] == torn.name


def test_group_stopped_by_a_notice_ends_the_attempt(runs: Runs, directory: JobDirectory) -> None:
    driver = make_driver(runs, directory, SimulatedCluster([ScriptedGroup(Stopped(), last_step=7, commits=[7])]))
    with pytest.raises(StoppedError, match="the same command resumes from it"):
        driver.run()
    assert StoppedError.exit_code == 10
    assert events(driver, "notice")[0]["step"] == 7
    assert status(directory)["phase"] != "Failed"


def test_superseded_group_ends_the_attempt(runs: Runs, directory: JobDirectory) -> None:
    driver = make_driver(
        runs, directory, SimulatedCluster([ScriptedGroup(Superseded("a later one runs"), last_step=7)])
    )
    with pytest.raises(SupersededError, match="a later one runs"):
        driver.run()
    assert len(events(driver, "superseded")) == 1


def test_superseded_driver_starts_no_further_group(runs: Runs, directory: JobDirectory) -> None:
    """The driver of a lost head may still run. Once its workers fail, it must not start another generation."""
    cluster = SimulatedCluster(
        [ScriptedGroup(LOST, last_step=7, before_exit=lambda: claim(directory, None)), ScriptedGroup(TRAINED)]
    )
    driver = make_driver(runs, directory, cluster)
    with pytest.raises(SupersededError, match="another driver of this job has started a generation after 1"):
        driver.run()
    assert len(cluster.tasks) == 1


def test_group_that_yields_to_more_workers_is_not_a_restart(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster(
        [ScriptedGroup(Yielded(), last_step=6, commits=[6]), ScriptedGroup(TRAINED, last_step=10)], slots=2
    )

    def grow() -> None:
        cluster.slots = 3

    cluster.groups[0].before_exit = grow
    driver = make_driver(runs, directory, cluster, count=4)
    driver.run()
    assert cluster.sizes == [2, 3]
    assert cluster.now == pytest.approx(30, abs=1), "no wait before the second group: its slots are known"
    assert [event["step"] for event in events(driver, "left")] == [6]
    assert events(driver, "failure") == []


def test_stop_while_waiting_for_workers_ends_the_attempt(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([], slots=0)
    cluster.while_sleeping = lambda: write_notice(directory.notice, seconds=5, stop=True, reason="ctrl-c")
    driver = make_driver(runs, directory, cluster)
    with pytest.raises(StoppedError, match="stopped on request while waiting"):
        driver.run()


def test_stop_during_backoff_ends_the_attempt(runs: Runs, directory: JobDirectory) -> None:
    cluster = SimulatedCluster([ScriptedGroup(LOST)] * 5)
    cluster.while_sleeping = lambda: write_notice(directory.notice, seconds=5, stop=True, reason="ctrl-c")
    with pytest.raises(StoppedError):
        make_driver(runs, directory, cluster, backoff={"initial": "10s", "max": "30s"}).run()
    assert len(cluster.tasks) == 2


def test_repeated_communication_failures_are_an_infrastructure_error(runs: Runs, directory: JobDirectory) -> None:
    disconnected = Failed(FailureCause.COMMUNICATION, "rank 0: RuntimeError: gloo: Connection closed by peer")
    driver = make_driver(
        runs, directory, SimulatedCluster([ScriptedGroup(disconnected)] * 20), backoff={"initial": "1s", "max": "1s"}
    )
    with pytest.raises(InfrastructureError, match="could not reach one another 10 times"):
        driver.run()


def test_changed_fingerprint_after_the_first_commit_is_a_job_error(runs: Runs, directory: JobDirectory) -> None:
    with pytest.raises(StoppedError):
        make_driver(runs, directory, SimulatedCluster([ScriptedGroup(Stopped(), last_step=5, commits=[5])])).run()
    cluster = SimulatedCluster([ScriptedGroup(TRAINED)])
    job = runs.job(workers={"gpus": 0, "count": 2}, training={"learningRate": 0.5})
    with pytest.raises(JobError, match="holds checkpoints of another model, data set or training"):
        Driver(directory, job, 2, cluster.dependencies()).run()
    assert cluster.tasks == []


def test_fingerprint_may_change_before_the_first_commit(runs: Runs, directory: JobDirectory) -> None:
    with pytest.raises(StoppedError):
        make_driver(runs, directory, SimulatedCluster([ScriptedGroup(Stopped(), last_step=3)])).run()
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10)])
    job = runs.job(workers={"gpus": 0, "count": 2}, training={"learningRate": 0.5}, execution={"microBatchSize": 2})
    Driver(directory, job, 2, cluster.dependencies()).run()
    assert cluster.tasks[0].plan["microBatchSize"] == 2


@pytest.mark.parametrize(
    ("error", "code"), [(JobError("bad"), 20), (InfrastructureError("gone"), 10), (SupersededError("later"), 30)]
)
def test_exit_code_of_an_attempt_is_that_of_its_error(
    runs: Runs, directory: JobDirectory, error: SpotuneError, code: int
) -> None:
    def fail() -> None:
        raise error

    cluster = SimulatedCluster([ScriptedGroup(TRAINED, before_exit=fail)])
    assert run_attempt(make_driver(runs, directory, cluster)) == code
