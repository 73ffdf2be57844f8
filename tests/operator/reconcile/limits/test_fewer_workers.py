"""Workers that the spec no longer asks for leave once the trainer knows that, so that it does not wait for others."""

from __future__ import annotations

from typing import Any

import pytest

from spotune_operator.observe.supervisor_status import PollResult
from spotune_operator.reconcile.limits.fewer_workers import desired_count
from tests.operator.support.scenarios import SETTINGS, Scenario, a_cluster_job, replicas, training_scenario

FEWER = {"count": 1, "min": 1}


def resized(**sections: Any) -> Scenario:
    """A job with two workers that train, whose spec asks for one since now. Its supervisor has the earlier job file."""
    scenario = training_scenario(**sections, workers={"count": 2, "min": 1})
    scenario.edit(a_cluster_job(**sections, workers=FEWER))
    return scenario


def learn(scenario: Scenario) -> None:
    """Let the supervisor read the present job file."""
    scenario.supervisor_reports(step=20, totalSteps=100)


def test_worker_stays_until_the_trainer_knows_that_nobody_wants_it() -> None:
    scenario = resized()
    for _ in range(3):
        assert replicas(scenario.decide(after=20)) == {"workers": 2}
        assert scenario.status.workers == "2/2"
    ready = scenario.condition("ClusterReady")
    assert ready.message == "2 of 2 workers run, until the trainer knows that workers.count is 1"
    assert scenario.is_true("Training")
    learn(scenario)
    assert replicas(scenario.decide()) == {"workers": 1}
    assert scenario.status.workers == "1/1"


@pytest.mark.parametrize("phase", ["WaitingForWorkers", "Loading"])
def test_workers_that_may_train_since_the_last_poll_stay_as_well(phase: str) -> None:
    scenario = training_scenario(workers={"count": 2, "min": 1})
    scenario.supervisor_reports(phase)
    scenario.decide()
    scenario.edit(a_cluster_job(workers=FEWER))
    assert replicas(scenario.decide()) == {"workers": 2}


def test_more_workers_are_created_at_once() -> None:
    scenario = training_scenario(workers={"count": 2, "min": 1})
    scenario.edit(a_cluster_job(workers={"count": 3, "min": 1}))
    assert replicas(scenario.decide()) == {"workers": 3}


@pytest.mark.parametrize(
    ("phase", "state", "why"),
    [
        ("Training", "running", "the changed job file is not used: spec.model changed, which would train something"),
        ("Training", "stopped", ""),
    ],
)
def test_trainer_that_will_not_learn_of_it_is_not_waited_for(phase: str, state: str, why: str) -> None:
    scenario = training_scenario(workers={"count": 2, "min": 1})
    scenario.supervisor_reports(phase, state, why=why)
    scenario.decide()
    scenario.edit(a_cluster_job(workers=FEWER))
    assert replicas(scenario.decide()) == {"workers": 1}


def test_unreachable_supervisor_is_not_waited_for() -> None:
    scenario = resized()
    scenario.polls_fail(since=scenario.now)
    assert replicas(scenario.decide(after=5)) == {"workers": 2}
    assert replicas(scenario.decide(after=SETTINGS.unreachable_seconds)) == {"workers": 1}


def test_an_operator_that_has_just_started_waits_for_its_first_poll() -> None:
    """It does not know whether the trainer has read the present job file."""
    scenario = resized()
    scenario.observe(poll=PollResult())
    assert replicas(scenario.decide()) == {"workers": 2}
    scenario.polls_fail(since=scenario.now)
    assert replicas(scenario.decide(after=5)) == {"workers": 2}
    assert replicas(scenario.decide(after=SETTINGS.unreachable_seconds)) == {"workers": 1}


def test_workers_without_a_head_are_not_waited_for() -> None:
    """The next driver reads the present job file."""
    scenario = resized()
    scenario.observe(poll=None)
    assert replicas(scenario.decide()) == {"workers": 1}


def test_lost_worker_that_nobody_wants_is_not_replaced() -> None:
    scenario = resized()
    scenario.has_pods(workers=1)
    assert replicas(scenario.decide()) == {"workers": 1}


def test_request_of_a_job_in_a_queue_stays_as_well() -> None:
    scenario = resized(cluster={"queueName": "team"})
    scenario.decide()
    assert scenario.status.queue is not None
    assert scenario.status.queue.workers == 2
    learn(scenario)
    scenario.decide()
    assert scenario.status.queue.workers == 1


@pytest.mark.parametrize(
    ("workers", "count"), [("2/3", 3), ("", None), ("2", 2), ("a/b", None), ("1/" + "9" * 5000, None)]
)
def test_desired_count_is_read_from_any_status(workers: str, count: int | None) -> None:
    assert desired_count(workers) == count
