"""Events about a job: one for each turn of a condition that people care for, and for each restart."""

from __future__ import annotations

import re
from typing import Any

import pytest

from spotune.job import FinetuneJobStatus
from spotune_operator.observe.caches import KnownJob
from spotune_operator.reconcile.events import job_events
from tests.operator.support.scenarios import Life, a_cluster_job, a_life, a_training_life

JOB = KnownJob.of(
    {"metadata": {"namespace": "team", "name": "job", "uid": "uid-1", "resourceVersion": "1", "generation": 1}}
)


def events(before: FinetuneJobStatus, after: FinetuneJobStatus, now: float = 1.8e9) -> list[dict[str, Any]]:
    return list(job_events(JOB, before, after, now))


def told(before: FinetuneJobStatus, after: FinetuneJobStatus) -> list[tuple[str, str, str]]:
    return [(event["type"], event["reason"], event["message"]) for event in events(before, after)]


def names(found: list[dict[str, Any]]) -> list[str]:
    return [event["metadata"]["name"] for event in found]


def test_nothing_is_told_of_a_status_that_stays() -> None:
    life = a_training_life()
    assert events(life.status, life.status) == []
    before = life.status
    life.trains(step=20)
    life.decide(after=60)
    assert events(before, life.status) == []


def test_a_new_job_tells_nothing_before_something_is_true() -> None:
    life = Life(a_cluster_job())
    life.decide()
    assert told(FinetuneJobStatus(), life.status) == []


def test_training_that_begins_is_told_once() -> None:
    life = a_life()
    before = life.status
    life.trains()
    life.decide()
    reasons = [reason for _, reason, _ in told(before, life.status)]
    assert sorted(reasons) == ["Bound", "Passed", "Training"]
    assert {kind for kind, _, _ in told(before, life.status)} == {"Normal"}


def test_what_is_told_again_after_a_crash_is_the_same_event() -> None:
    """The operator ends between the Events and the status: the next one tells the same, later."""
    life = a_training_life()
    before = life.status
    life.trains(step=10, restarts={"workerLost": 1})
    life.supervisor_says("Failed", "failed", why="no column 'question'", restarts={"workerLost": 1})
    life.decide(after=60)
    first = events(before, life.status, now=life.now)
    life.status = before
    life.decide(after=30)
    again = events(before, life.status, now=life.now)
    assert names(again) == names(first)
    assert len(set(names(first))) == len(first) >= 3


def test_another_turn_is_another_event() -> None:
    life = a_training_life()
    seen: list[str] = []
    for suspend in (True, False, True):
        before = life.status
        life.edit(a_cluster_job(suspend=suspend))
        life.decide(after=60)
        seen += names([event for event in events(before, life.status) if event["reason"] == "Suspending"])
    assert len(seen) == len(set(seen)) == 2


def test_what_two_conditions_say_is_told_once() -> None:
    life = a_training_life()
    before = life.status
    life.supervisor_says("Failed", "failed", why="no column 'question'")
    life.decide()
    assert [text for _, _, text in told(before, life.status)].count("no column 'question'") == 1


def test_another_job_of_the_same_name_has_its_own_events() -> None:
    life = a_life()
    before = life.status
    life.trains()
    life.decide()
    other = KnownJob(**{name: getattr(JOB, name) for name in KnownJob.__slots__} | {"uid": "uid-2"})
    theirs = list(job_events(other, before, life.status, 1.8e9))
    assert not set(names(theirs)) & set(names(events(before, life.status)))
    assert {event["involvedObject"]["uid"] for event in theirs} == {"uid-2"}


def test_each_restart_is_told_with_its_cause_and_where_training_goes_on() -> None:
    life = a_training_life()
    life.trains(step=60, lastCheckpoint={"step": 50, "time": 1.8e9}, restarts={"workerLost": 1})
    before = life.status
    life.decide()
    assert told(before, life.status)[-1] == ("Warning", "Restarted", "a worker was lost; training goes on from step 50")
    before = life.status
    life.trains(step=60, restarts={"workerLost": 2, "headLost": 1, "preempted": 1, "hang": 1, "outOfMemory": 1})
    life.decide()
    found = events(before, life.status)
    assert [event["reason"] for event in found] == ["Restarted"] * 5
    assert len(set(names(found))) == 5


@pytest.mark.parametrize("uid_of", ["job", "a" * 40])
def test_event_is_one_that_the_api_server_takes(uid_of: str) -> None:
    life = a_training_life()
    before = life.status
    life.supervisor_says("Failed", "failed", why="x" * 5000)
    life.decide()
    job = KnownJob(**{name: getattr(JOB, name) for name in KnownJob.__slots__} | {"name": uid_of})
    for event in job_events(job, before, life.status, 1.8e9):
        metadata = event["metadata"]
        assert re.fullmatch("[a-z0-9]([-a-z0-9.]*[a-z0-9])?", metadata["name"])
        assert metadata["namespace"] == event["involvedObject"]["namespace"] == "team"
        assert len(event["message"]) <= 1000
        assert event["firstTimestamp"] == event["lastTimestamp"] == "2027-01-15T08:00:00Z"
