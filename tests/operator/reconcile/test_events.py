"""Events about a job: one for each turn of a condition that people care for, and for each restart."""

from __future__ import annotations

import re
from typing import Any

import pytest

from spotune.job import FinetuneJobStatus
from spotune_operator.observe.caches import CachedJob
from spotune_operator.reconcile.events import job_events
from tests.operator.support.scenarios import Scenario, a_cluster_job, new_scenario, training_scenario

JOB = CachedJob.of(
    {"metadata": {"namespace": "team", "name": "job", "uid": "uid-1", "resourceVersion": "1", "generation": 1}}
)


def events(before: FinetuneJobStatus, after: FinetuneJobStatus, now: float = 1.8e9) -> list[dict[str, Any]]:
    return list(job_events(JOB, before, after, now))


def recorded(before: FinetuneJobStatus, after: FinetuneJobStatus) -> list[tuple[str, str, str]]:
    return [(event["type"], event["reason"], event["message"]) for event in events(before, after)]


def names(found: list[dict[str, Any]]) -> list[str]:
    return [event["metadata"]["name"] for event in found]


def test_unchanged_status_has_no_events() -> None:
    scenario = training_scenario()
    assert events(scenario.status, scenario.status) == []
    before = scenario.status
    scenario.trains(step=20)
    scenario.decide(after=60)
    assert events(before, scenario.status) == []


def test_new_job_has_no_events() -> None:
    scenario = Scenario(a_cluster_job())
    scenario.decide()
    assert recorded(FinetuneJobStatus(), scenario.status) == []


def test_start_of_training_is_one_event() -> None:
    scenario = new_scenario()
    before = scenario.status
    scenario.trains()
    scenario.decide()
    reasons = [reason for _, reason, _ in recorded(before, scenario.status)]
    assert sorted(reasons) == ["Bound", "Passed", "Training"]
    assert {kind for kind, _, _ in recorded(before, scenario.status)} == {"Normal"}


def test_event_repeated_after_a_crash_has_the_same_name() -> None:
    """The operator ends between the Events and the status: the next one tells the same, later."""
    scenario = training_scenario()
    before = scenario.status
    scenario.trains(step=10, restarts={"workerLost": 1})
    scenario.supervisor_reports("Failed", "failed", why="no column 'question'", restarts={"workerLost": 1})
    scenario.decide(after=60)
    first = events(before, scenario.status, now=scenario.now)
    scenario.status = before
    scenario.decide(after=30)
    again = events(before, scenario.status, now=scenario.now)
    assert names(again) == names(first)
    assert len(set(names(first))) == len(first) >= 3


def test_another_transition_is_another_event() -> None:
    scenario = training_scenario()
    found_names: list[str] = []
    for suspend in (True, False, True):
        before = scenario.status
        scenario.edit(a_cluster_job(suspend=suspend))
        scenario.decide(after=60)
        found_names += names([event for event in events(before, scenario.status) if event["reason"] == "Suspending"])
    assert len(found_names) == len(set(found_names)) == 2


def test_same_message_of_two_conditions_is_one_event() -> None:
    scenario = training_scenario()
    before = scenario.status
    scenario.supervisor_reports("Failed", "failed", why="no column 'question'")
    scenario.decide()
    assert [text for _, _, text in recorded(before, scenario.status)].count("no column 'question'") == 1


def test_event_of_a_failed_preflight_has_its_cause() -> None:
    scenario = new_scenario()
    scenario.has_children()
    scenario.has_pods()
    before = scenario.status
    checks = [{"name": "model", "status": "failed", "message": "no such file"}]
    scenario.supervisor_reports("Starting", "preflight", passed=False, checks=checks)
    scenario.decide()
    assert (
        recorded(before, scenario.status).count(
            ("Warning", "PreflightFailed", "preflight check model failed; model: no such file")
        )
        == 1
    )


def test_another_job_of_the_same_name_has_its_own_events() -> None:
    scenario = new_scenario()
    before = scenario.status
    scenario.trains()
    scenario.decide()
    other = CachedJob(**{name: getattr(JOB, name) for name in CachedJob.__slots__} | {"uid": "uid-2"})
    theirs = list(job_events(other, before, scenario.status, 1.8e9))
    assert not set(names(theirs)) & set(names(events(before, scenario.status)))
    assert {event["involvedObject"]["uid"] for event in theirs} == {"uid-2"}


def test_event_of_a_restart_has_its_cause_and_step() -> None:
    scenario = training_scenario()
    scenario.trains(step=60, lastCheckpoint={"step": 50, "time": 1.8e9}, restarts={"workerLost": 1})
    before = scenario.status
    scenario.decide()
    assert recorded(before, scenario.status)[-1] == (
        "Warning",
        "Restarted",
        "a worker was lost; training continues from step 50",
    )
    before = scenario.status
    counts = {"workerLost": 2, "headLost": 1, "preempted": 1, "hang": 1, "outOfMemory": 1}
    scenario.trains(step=60, generation=2, restarts=counts)
    scenario.decide()
    found = events(before, scenario.status)
    assert [event["reason"] for event in found] == ["Restarted"] * 5
    assert len(set(names(found))) == 5


@pytest.mark.parametrize("phase", ["Training", "Loading", "Evaluating", "Exporting"])
def test_head_that_the_workers_outlive_is_no_restart(phase: str) -> None:
    scenario = training_scenario()
    scenario.trains(step=60, generation=1)
    scenario.decide()
    before = scenario.status
    scenario.trains(step=75, generation=1, phase=phase, restarts={"headLost": 1})
    scenario.decide()
    restarts = [found for found in recorded(before, scenario.status) if found[1] in ("HeadReplaced", "Restarted")]
    assert restarts == [("Normal", "HeadReplaced", "the head was replaced; training went on without a lost step")]


@pytest.mark.parametrize(
    ("phase", "generation"),
    [("WaitingForWorkers", 1), ("Starting", 1), ("Preparing", 1), ("Loading", 2), ("Training", 2)],
)
def test_head_that_the_workers_did_not_outlive_is_a_restart(phase: str, generation: int) -> None:
    scenario = training_scenario()
    scenario.trains(step=60, generation=1, lastCheckpoint={"step": 50, "time": 1.8e9})
    scenario.decide()
    before = scenario.status
    scenario.trains(step=60, generation=generation, phase=phase, restarts={"headLost": 1})
    scenario.decide()
    expected = ("Warning", "Restarted", "the head was lost; training continues from step 50")
    assert expected in recorded(before, scenario.status)


@pytest.mark.parametrize("count", [1, 3])
def test_resize_by_the_user_is_no_restart(count: int) -> None:
    scenario = training_scenario(workers={"count": 2, "min": 1})
    before = scenario.status
    scenario.edit(a_cluster_job(workers={"count": count, "min": 1}))
    scenario.supervisor_reports(step=20)
    scenario.decide()
    assert recorded(before, scenario.status) == [
        ("Normal", "Resized", f"workers.count was changed from 2 to {count}"),
    ]


@pytest.mark.parametrize("uid_of", ["job", "a" * 40])
def test_event_is_valid_for_the_api_server(uid_of: str) -> None:
    scenario = training_scenario()
    before = scenario.status
    scenario.supervisor_reports("Failed", "failed", why="x" * 5000)
    scenario.decide()
    job = CachedJob(**{name: getattr(JOB, name) for name in CachedJob.__slots__} | {"name": uid_of})
    for event in job_events(job, before, scenario.status, 1.8e9):
        metadata = event["metadata"]
        assert re.fullmatch("[a-z0-9]([-a-z0-9.]*[a-z0-9])?", metadata["name"])
        assert metadata["namespace"] == event["involvedObject"]["namespace"] == "team"
        assert len(event["message"]) <= 1000
        assert event["firstTimestamp"] == event["lastTimestamp"] == "2027-01-15T08:00:00Z"
