"""A driver finds the worker group of an earlier driver, which may still train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.driver.adoption import ADOPTION_SECONDS
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.supervisor.recovery import record_failure
from spotune_trainer.worker_group.result import FoundGroup, GroupResult, Stopped
from tests.trainer.support.drivers import events, make_driver, status
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import LOST, TRAINED, ScriptedGroup, SimulatedCluster


class KilledError(Exception):
    """The driver is killed."""


@pytest.fixture
def left(runs: Runs, directory: JobDirectory) -> FoundGroup:
    """A group of two workers whose driver was killed at step 6, with a commit of step 4."""

    def kill() -> None:
        raise KilledError

    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=6, commits=[4], before_exit=kill)])
    with pytest.raises(KilledError):
        make_driver(runs, directory, cluster).run()
    return FoundGroup(cluster.tasks[0], 2, 2, has_failed=False)


def next_driver(
    runs: Runs, directory: JobDirectory, left: FoundGroup | None, *groups: ScriptedGroup
) -> SimulatedCluster:
    """Run the next driver to its end; returns its cluster."""
    cluster = SimulatedCluster(list(groups))
    cluster.left_group = left
    make_driver(runs, directory, cluster).run()
    return cluster


def report_step_7(group: FoundGroup) -> None:
    """Write what the workers report after another step."""
    progress = {"time": 2.0, "heartbeat": 9, "phase": "Training", "step": 7}
    times = {"startedAt": 1.0, "startup": {}, "part": "productive", "seconds": {}}
    files.write_json(group.task.logs.progress, {**progress, **times})


def goes_on(task_step: int, result: GroupResult = TRAINED) -> ScriptedGroup:
    return ScriptedGroup(result, last_step=task_step)


def test_group_of_which_all_workers_are_found_goes_on(runs: Runs, directory: JobDirectory, left: FoundGroup) -> None:
    cluster = next_driver(runs, directory, left, ScriptedGroup(TRAINED, last_step=10, commits=[10]))
    assert cluster.tasks == [left.task], "no other group is started"
    driver = make_driver(runs, directory, cluster)
    assert len(events(driver, "generation-started")) == 1
    assert [event["generation"] for event in events(driver, "adopted")] == [1]
    assert len(events(driver, "generation-ended")) == 1
    found = status(directory)
    assert (found["phase"], found["generation"], found["stepsLost"]) == ("Done", 1, 0)


def test_group_that_has_lost_a_worker_is_ended_and_the_next_one_starts_from_the_last_commit(
    runs: Runs, directory: JobDirectory, left: FoundGroup
) -> None:
    cluster = next_driver(runs, directory, replace(left, has_failed=True, found=1), goes_on(10))
    assert cluster.left_group is None, "its workers were ended"
    assert [task.restore for task in cluster.tasks] == ["step-00000004.gen-1"]
    driver = make_driver(runs, directory, cluster)
    assert events(driver, "adopted") == []
    assert events(driver, "generation-started")[-1]["stepsLost"] == 2


def test_driver_does_not_look_for_a_group_once_all_nodes_are_there_without_it(
    runs: Runs, directory: JobDirectory, left: FoundGroup
) -> None:
    cluster = next_driver(runs, directory, None, goes_on(10))
    assert cluster.now == 0
    assert [task.generation for task in cluster.tasks] == [2]


def test_driver_waits_for_nodes_that_have_not_joined_yet_for_a_limited_time(
    runs: Runs, directory: JobDirectory, left: FoundGroup
) -> None:
    cluster = SimulatedCluster([goes_on(10)], slots=1)
    cluster.left_group = replace(left, found=1)
    make_driver(runs, directory, cluster).run()
    assert cluster.started[0] >= ADOPTION_SECONDS
    assert [task.generation for task in cluster.tasks] == [2]


def test_head_that_was_lost_is_counted_once_it_is_known_what_that_meant(
    runs: Runs, directory: JobDirectory, left: FoundGroup
) -> None:
    """Until then its workers may train: whoever reads the count learns at the same time whether they did."""
    record_failure(directory, FailureCause.HEAD_LOST, "the head was lost", 6)
    cluster = SimulatedCluster([ScriptedGroup(TRAINED, last_step=10, commits=[10])], slots=1)
    cluster.left_group = replace(left, found=1)
    seen: list[tuple[str, int, bool]] = []

    def look() -> None:
        found = status(directory)
        seen.append((found["phase"], found["restarts"]["headLost"], bool(found["adopting"])))
        if len(seen) == 1:
            report_step_7(left)
        elif len(seen) == 3:
            cluster.left_group = left

    cluster.while_sleeping = look
    make_driver(runs, directory, cluster).run()
    assert seen == [("WaitingForWorkers", 0, True), ("Training", 0, True), ("Training", 0, True)]
    found = status(directory)
    assert (found["restarts"]["headLost"], found["adopting"], found["generation"]) == (1, None, 1)


def test_group_that_was_shown_and_is_given_up_no_longer_trains(
    runs: Runs, directory: JobDirectory, left: FoundGroup
) -> None:
    record_failure(directory, FailureCause.HEAD_LOST, "the head was lost", 6)
    cluster = SimulatedCluster([goes_on(10)], slots=1)
    cluster.left_group = replace(left, found=1)
    seen: list[dict[str, Any]] = []

    def lose_worker() -> None:
        report_step_7(left)
        if status(directory)["phase"] == "Training":
            cluster.left_group = replace(left, found=1, has_failed=True)

    cluster.while_sleeping = lose_worker
    driver = make_driver(runs, directory, cluster)
    update = driver.status.update

    def watched(phase: Phase | None = None, **values: Any) -> None:
        update(phase, **values)
        seen.append(status(directory))

    driver.status.update = watched  # type: ignore[method-assign] # every status, and not only those at a pause
    driver.run()
    counted = [found["phase"] for found in seen if found["generation"] == 1 and found["restarts"]["headLost"]]
    assert counted
    assert set(counted) == {"WaitingForWorkers"}


def test_time_that_agents_take_to_reply_counts(runs: Runs, directory: JobDirectory, left: FoundGroup) -> None:
    cluster = SimulatedCluster([goes_on(10)], slots=1)
    cluster.left_group = replace(left, found=1)

    def reply_slowly() -> None:
        cluster.now += 30.0

    cluster.while_sleeping = reply_slowly
    make_driver(runs, directory, cluster).run()
    assert ADOPTION_SECONDS <= cluster.started[0] < 2 * ADOPTION_SECONDS


def test_group_that_stopped_for_a_request_which_is_withdrawn_is_followed_by_another_one(
    runs: Runs, directory: JobDirectory, left: FoundGroup
) -> None:
    assert files.read_json(directory.notice) is None
    cluster = next_driver(runs, directory, left, goes_on(8, Stopped()), goes_on(10))
    assert [task.generation for task in cluster.tasks] == [1, 2]


def test_group_that_fails_after_it_was_adopted_is_followed_by_another_one(
    runs: Runs, directory: JobDirectory, left: FoundGroup
) -> None:
    cluster = next_driver(runs, directory, left, goes_on(8, LOST), goes_on(10))
    assert [task.generation for task in cluster.tasks] == [1, 2]
    assert status(directory)["restarts"]["workerLost"] == 1
