"""The driver: one worker group after another until the model is trained or nothing more can be done, on fake time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from spotune.errors import InfrastructureError, JobError, SpotuneError, SupersededError
from spotune.plan.execution import ExecutionPlan, resolve_execution
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import MANIFEST
from spotune_trainer.driver import __main__ as driver_process
from spotune_trainer.driver import planning
from spotune_trainer.driver.driver import Driver, StoppedError, run_attempt
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.worker_group.result import CorruptCheckpoint, Failed, Left, Stopped, Superseded
from tests.trainer.support.checkpoints import put_checkpoint
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import BROKEN, FIGURES, LOST, OUT_OF_MEMORY, TRAINED, Group, World
from tests.trainer.support.waiting import wait_until


def make_driver(
    runs: Runs, directory: JobDirectory, world: World, count: int = 2, minimum: int = 1, **retry: Any
) -> Driver:
    job = runs.job(
        workers={"count": count, "min": minimum, "gpus": 0},
        execution={"microBatchSize": 4, "zeroStage": 1},
        retry=retry,
    )
    return Driver(directory, job, 1, world.surroundings())


def events(driver: Driver, *names: str) -> list[dict[str, Any]]:
    return driver.ledger.records(*names)


def status(directory: JobDirectory) -> dict[str, Any]:
    value = files.read_json(directory.status)
    assert isinstance(value, dict)
    return value


def test_a_trained_model_leaves_its_figures(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(TRAINED, last=10, commits=[10])])
    driver = make_driver(runs, directory, world)
    driver.run()
    assert world.sizes == [2]
    result = files.read_json(directory.result)
    assert result is not None
    assert result.items() >= FIGURES.items()
    assert (result["exactMatch"], result["executionAccuracy"], result["restarts"]) == (None, None, 0)
    assert result["export"] == str(directory.export)
    assert result["wallSeconds"] == pytest.approx(sum(result["goodputParts"].values()))
    names = [record["event"] for record in events(driver)]
    assert names == ["generation-started", "generation-ended", "finished"]
    started = events(driver, "generation-started")[0]
    assert (started["generation"], started["restoredFrom"], started["step"], started["stepsLost"]) == (1, None, 0, 0)
    assert (started["worldSize"], started["zeroStage"], started["microBatchSize"]) == (2, 1, 4)
    assert status(directory)["phase"] == "Done"


def test_a_metric_that_cannot_be_imported_ends_the_job_before_workers_are_waited_for(
    runs: Runs, directory: JobDirectory
) -> None:
    world = World([Group(TRAINED, last=10, commits=[10])])
    evaluation = {"generate": True, "metrics": ["judges:length"]}
    job = runs.job(dataset={"eval": {"fraction": 0.5}}, training={"evaluation": evaluation})
    driver = Driver(directory, job, 1, world.surroundings())
    with pytest.raises(JobError, match=r"training.evaluation.metrics: judges:length cannot be imported"):
        driver.run()
    assert world.sizes == []
    assert status(directory)["phase"] == "Failed"


def test_a_lost_worker_group_is_followed_by_one_from_the_last_commit(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(LOST, last=8, commits=[5]), Group(TRAINED, last=10, commits=[10])])
    driver = make_driver(runs, directory, world)
    driver.run()
    assert [task.restore for task in world.tasks] == [None, "step-00000005.gen-1"]
    assert [task.generation for task in world.tasks] == [1, 2]
    assert world.now == 0, "the first failure after new steps is retried at once"
    started = events(driver, "generation-started")[1]
    assert (started["restoredFrom"], started["step"], started["stepsLost"]) == ("step-00000005.gen-1", 5, 3)
    assert started["secondsLost"] == pytest.approx(3 * 0.08)
    assert [record["steps"] for record in events(driver, "generation-ended")] == [8, 5]
    (failure,) = events(driver, "failure")
    assert (failure["cause"], failure["step"], failure["message"]) == ("workerLost", 8, LOST.message)
    found = status(directory)
    assert found["restarts"]["workerLost"] == 1
    assert (found["resumedFromStep"], found["stepsLost"]) == (5, 3)


def test_failures_without_a_new_step_are_retried_more_and_more_rarely(runs: Runs, directory: JobDirectory) -> None:
    world = World([*[Group(LOST)] * 5, Group(TRAINED, last=10)])
    make_driver(runs, directory, world, backoff={"initial": "10s", "max": "30s"}).run()
    pauses = [later - earlier for earlier, later in zip(world.started, world.started[1:], strict=False)]
    assert pauses == pytest.approx([0, 10, 20, 30, 30], abs=1)


def test_a_job_that_always_fails_ends_after_its_limit_with_its_text(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(BROKEN, last=4, commits=[])] * 5)
    driver = make_driver(runs, directory, world, appFailureLimit=3)
    with pytest.raises(JobError, match=r"failed 3 times without a new step \(step 4\): rank 0: ValueError: row 7"):
        driver.run()
    assert len(world.tasks) == 3
    found = status(directory)
    assert found["phase"] == "Failed"
    assert "row 7 has no labels" in found["message"]
    assert found["restarts"]["appError"] == 3


def test_failures_between_new_steps_are_never_too_many(runs: Runs, directory: JobDirectory) -> None:
    groups = [Group(BROKEN, last=step + 1, commits=[step]) for step in range(1, 9)]
    world = World([*groups, Group(TRAINED, last=10)])
    make_driver(runs, directory, world, appFailureLimit=2).run()
    assert len(world.tasks) == 9


def test_attempts_before_count_with_those_of_this_driver(runs: Runs, directory: JobDirectory) -> None:
    make_driver(runs, directory, World([])).ledger.append("failure", cause="appError", step=0, message="earlier")
    driver = make_driver(runs, directory, World([Group(BROKEN)] * 3), appFailureLimit=2)
    with pytest.raises(JobError, match="failed 2 times"):
        driver.run()


def test_out_of_memory_halves_the_micro_batch_and_records_it(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(OUT_OF_MEMORY, last=3), Group(OUT_OF_MEMORY), Group(TRAINED, last=10)])
    make_driver(runs, directory, world).run()
    assert [task.plan["microBatchSize"] for task in world.tasks] == [4, 2, 1]
    plan = files.read_json(directory.plan)
    assert plan is not None
    assert (plan["version"], plan["microBatchSize"]) == (3, 1)
    assert [change["microBatchSize"] for change in plan["changes"]] == [[4, 2], [2, 1]]
    assert plan["changes"][0]["step"] == 3
    assert plan["requested"]["microBatchSize"] == 4


def test_out_of_memory_gives_up_spare_memory_before_the_micro_batch(runs: Runs, directory: JobDirectory) -> None:
    world = World([*[Group(OUT_OF_MEMORY)] * 3, Group(TRAINED, last=10)])

    def resolved(*arguments: Any) -> ExecutionPlan:
        return replace(resolve_execution(*arguments), gathered_layers=2, whole_gradients=True)

    with patch.object(planning, "resolve_execution", resolved):
        make_driver(runs, directory, world).run()
    names = ("wholeGradients", "gatheredLayers", "microBatchSize")
    assert [tuple(task.plan[name] for name in names) for task in world.tasks] == [
        (True, 2, 4),
        (False, 2, 4),
        (False, 0, 4),
        (False, 0, 2),
    ]


def test_out_of_memory_with_one_sample_is_the_users_to_solve(runs: Runs, directory: JobDirectory) -> None:
    driver = make_driver(runs, directory, World([Group(OUT_OF_MEMORY)] * 3))
    with pytest.raises(JobError, match="out of memory at step 0 with a micro-batch of one sample"):
        driver.run()


def test_a_corrupt_checkpoint_is_passed_over_and_said_once(runs: Runs, directory: JobDirectory) -> None:
    corrupt = CorruptCheckpoint("step-00000006.gen-1", "checkpoint step-00000006.gen-1 is corrupt: rank-00000")
    world = World([Group(LOST, last=8, commits=[3, 6]), Group(corrupt), Group(LOST, last=4), Group(TRAINED, last=10)])
    driver = make_driver(runs, directory, world)
    driver.run()
    three, six = "step-00000003.gen-1", "step-00000006.gen-1"
    assert [task.restore for task in world.tasks] == [None, six, three, three]
    (skipped,) = events(driver, "checkpoint-skipped")
    assert (skipped["checkpoint"], skipped["reason"]) == (six, corrupt.message)
    assert [record["cause"] for record in events(driver, "failure")] == ["workerLost"] * 2
    assert events(driver, "generation-started")[2]["stepsLost"] == 3


def test_a_torn_checkpoint_is_passed_over_and_said_once(runs: Runs, directory: JobDirectory) -> None:
    claim(directory, None)
    put_checkpoint(directory, 3, 1)
    torn = directory.checkpoints / str(put_checkpoint(directory, 6, 1))
    (torn / MANIFEST).write_text("{")
    world = World([Group(LOST, last=4), Group(TRAINED, last=10)])
    driver = make_driver(runs, directory, world)
    driver.run()
    assert [task.restore for task in world.tasks] == ["step-00000003.gen-1"] * 2
    (skipped,) = events(driver, "checkpoint-skipped")
    assert skipped["checkpoint"] == torn.name


def test_a_group_that_a_notice_stopped_ends_the_attempt(runs: Runs, directory: JobDirectory) -> None:
    driver = make_driver(runs, directory, World([Group(Stopped(), last=7, commits=[7])]))
    with pytest.raises(StoppedError, match="the same command goes on from it"):
        driver.run()
    assert StoppedError.exit_code == 10
    assert events(driver, "notice")[0]["step"] == 7
    assert status(directory)["phase"] != "Failed"


def test_a_superseded_group_ends_the_attempt(runs: Runs, directory: JobDirectory) -> None:
    driver = make_driver(runs, directory, World([Group(Superseded("a later one runs"), last=7)]))
    with pytest.raises(SupersededError, match="a later one runs"):
        driver.run()
    assert len(events(driver, "superseded")) == 1


def test_a_driver_that_another_one_superseded_starts_nothing_more(runs: Runs, directory: JobDirectory) -> None:
    """A lost head's driver may live on; its workers fail, but the generation after them is not for it to start."""
    world = World([Group(LOST, last=7, before_end=lambda: claim(directory, None)), Group(TRAINED)])
    driver = make_driver(runs, directory, world)
    with pytest.raises(SupersededError, match="another driver of this job has started a generation after 1"):
        driver.run()
    assert len(world.tasks) == 1


def test_missing_workers_are_waited_for_then_fewer_are_enough(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(TRAINED, last=10)], slots=2)
    make_driver(runs, directory, world, count=4, minimum=2).run()
    assert world.sizes == [2]
    assert world.started == pytest.approx([30], abs=1)


def test_too_few_workers_are_waited_for_and_said(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(TRAINED, last=10)], slots=1)
    seen: list[dict[str, Any]] = []

    def look() -> None:
        seen.append(status(directory))
        if world.now > 100:
            world.slots = 4

    world.while_sleeping = look
    driver = make_driver(runs, directory, world, count=4, minimum=2)
    driver.run()
    assert world.sizes == [4]
    (waiting,) = events(driver, "waiting")
    assert (waiting["slots"], waiting["wanted"]) == (1, 4)
    assert (seen[0]["phase"], seen[0]["workers"]) == ("WaitingForWorkers", {"running": 0, "wanted": 4})
    assert seen[0]["message"] == "1 of 4 workers are there (2 are needed)"
    beats = [each["heartbeat"] for each in seen]
    assert beats == sorted(set(beats)), "a driver that waits is alive"


def test_workers_that_are_being_started_are_not_missing(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(TRAINED, last=10)], ready=0)

    def start() -> None:
        world.ready = 2

    world.while_sleeping = start
    driver = make_driver(runs, directory, world)
    driver.run()
    assert world.sizes == [2]
    assert events(driver, "waiting") == []


def announced(world: World, directory: JobDirectory, node: str) -> Callable[[], object]:
    """During a group the node is announced to go, and the group is told."""

    def announce() -> None:
        world.draining[node] = time.time() + 30
        assert wait_until(directory.generation_logs(len(world.tasks)).notice.exists, 30)

    return announce


def test_a_group_that_leaves_before_its_node_goes_is_followed_on_the_others(
    runs: Runs, directory: JobDirectory
) -> None:
    world = World([Group(Left(), last=6, commits=[6]), Group(TRAINED, last=10)])
    world.groups[0].before_end = announced(world, directory, "n1")
    driver = make_driver(runs, directory, world)
    driver.run()
    assert world.sizes == [2, 1]
    assert world.now == pytest.approx(30, abs=1), "the worker's replacement is waited for, but not for ever"
    assert world.tasks[1].restore == "step-00000006.gen-1"
    (failure,) = events(driver, "failure")
    assert failure["cause"] == "preempted"
    assert failure["message"] == "1 node(s) of the workers are being taken away; the state is committed"
    assert [event["generation"] for event in events(driver, "leaving")] == [1]
    assert events(driver, "generation-started")[1]["stepsLost"] == 0
    assert status(directory)["restarts"]["preempted"] == 1


def test_a_worker_whose_node_was_announced_to_go_was_preempted(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(LOST, last=6, commits=[5]), Group(TRAINED, last=10)])
    world.groups[0].before_end = announced(world, directory, "n0")
    driver = make_driver(runs, directory, world)
    driver.run()
    (failure,) = events(driver, "failure")
    assert (failure["cause"], failure["message"]) == ("preempted", LOST.message)


def test_a_group_that_leaves_for_more_workers_counts_as_no_restart(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(Left(), last=6, commits=[6]), Group(TRAINED, last=10)], slots=2)

    def grow() -> None:
        world.slots = 3

    world.groups[0].before_end = grow
    driver = make_driver(runs, directory, world, count=4)
    driver.run()
    assert world.sizes == [2, 3]
    assert world.now == pytest.approx(30, abs=1), "for the first group alone; what the second one has room for is known"
    assert [event["step"] for event in events(driver, "left")] == [6]
    assert events(driver, "failure") == []


def test_a_stop_while_waiting_ends_the_attempt(runs: Runs, directory: JobDirectory) -> None:
    world = World([], slots=0)
    world.while_sleeping = lambda: write_notice(directory.notice, seconds=5, stop=True, reason="ctrl-c")
    driver = make_driver(runs, directory, world)
    with pytest.raises(StoppedError, match="stopped as asked while waiting"):
        driver.run()


def test_a_stop_during_backoff_ends_the_attempt(runs: Runs, directory: JobDirectory) -> None:
    world = World([Group(LOST)] * 5)
    world.while_sleeping = lambda: write_notice(directory.notice, seconds=5, stop=True, reason="ctrl-c")
    with pytest.raises(StoppedError):
        make_driver(runs, directory, world, backoff={"initial": "10s", "max": "30s"}).run()
    assert len(world.tasks) == 2


def test_workers_that_cannot_talk_are_given_up_as_infrastructure(runs: Runs, directory: JobDirectory) -> None:
    silent = Failed(FailureCause.COMMUNICATION, "rank 0: RuntimeError: gloo: Connection closed by peer")
    driver = make_driver(runs, directory, World([Group(silent)] * 20), backoff={"initial": "1s", "max": "1s"})
    with pytest.raises(InfrastructureError, match="could not reach one another 10 times"):
        driver.run()


def test_other_meaning_after_the_first_commit_is_refused(runs: Runs, directory: JobDirectory) -> None:
    with pytest.raises(StoppedError):
        make_driver(runs, directory, World([Group(Stopped(), last=5, commits=[5])])).run()
    world = World([Group(TRAINED)])
    job = runs.job(workers={"gpus": 0, "count": 2}, training={"learningRate": 0.5})
    with pytest.raises(JobError, match="holds checkpoints of another model, data set or training"):
        Driver(directory, job, 2, world.surroundings()).run()
    assert world.tasks == []


def test_before_the_first_commit_everything_may_change(runs: Runs, directory: JobDirectory) -> None:
    with pytest.raises(StoppedError):
        make_driver(runs, directory, World([Group(Stopped(), last=3)])).run()
    world = World([Group(TRAINED, last=10)])
    job = runs.job(workers={"gpus": 0, "count": 2}, training={"learningRate": 0.5}, execution={"microBatchSize": 2})
    Driver(directory, job, 2, world.surroundings()).run()
    assert world.tasks[0].plan["microBatchSize"] == 2


@pytest.mark.parametrize(
    ("error", "code"), [(JobError("bad"), 20), (InfrastructureError("gone"), 10), (SupersededError("later"), 30)]
)
def test_an_attempt_ends_with_the_exit_code_of_its_error(
    runs: Runs, directory: JobDirectory, error: SpotuneError, code: int
) -> None:
    def fail() -> None:
        raise error

    world = World([Group(TRAINED, before_end=fail)])
    assert run_attempt(make_driver(runs, directory, world)) == code


def test_the_command_needs_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        driver_process.main(["--attempt", "1"])
    assert exit_info.value.code == 2
    assert "--directory" in capsys.readouterr().err
