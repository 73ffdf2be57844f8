"""With a deadline, slack decides between waiting for spot workers and paying for on-demand workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotune_operator.children.raycluster import ON_DEMAND_GROUP
from spotune_operator.errors import StalledError
from spotune_operator.reconcile.pinned import template_hashes
from tests.operator.support.scenarios import NOW, SETTINGS, Scenario, a_cluster_job, new_scenario, replicas

HOUR = 3600.0
SPOT_THEN_ON_DEMAND = {"count": 2, "min": 1, "capacity": "spot-then-on-demand", "onDemandAfter": "10m"}
MEASURED: dict[str, Any] = {"totalSteps": 100, "lastCheckpoint": {"step": 40, "time": NOW}}


def a_scenario(deadline: str, **workers: Any) -> Scenario:
    """A job that has trained 40 of 100 steps, with 6 h to go."""
    scenario = new_scenario(workers=SPOT_THEN_ON_DEMAND | workers, deadline=deadline)
    scenario.observe(created=NOW)
    scenario.trains(step=40, etaSeconds=6 * HOUR, **MEASURED)
    scenario.decide()
    return scenario


def lose_a_worker(scenario: Scenario) -> None:
    scenario.has_pods(workers=1, pending=1)
    scenario.supervisor_reports(step=40, phase="WaitingForWorkers", **MEASURED)


def test_with_slack_the_job_waits_longer_than_on_demand_after() -> None:
    scenario = a_scenario("20h")
    condition = scenario.condition("DeadlineAtRisk")
    assert (condition.status, condition.reason) == ("False", "InTime")
    assert condition.message == "trains on spot nodes, with about 14 h 00 min of slack"
    lose_a_worker(scenario)
    decision = scenario.decide(after=1200)
    assert replicas(decision) == {"workers": 2, "on-demand": 0}
    assert scenario.condition("DeadlineAtRisk").message == "waits for spot nodes, with about 13 h 00 min of slack"
    assert decision.requeue_after is not None
    assert decision.requeue_after <= 60.2


def test_wait_that_takes_its_share_of_the_slack_ends_with_on_demand_workers() -> None:
    scenario = a_scenario("9h")
    lose_a_worker(scenario)
    assert replicas(scenario.decide(after=1200)) == {"workers": 2, "on-demand": 0}
    assert replicas(scenario.decide(after=1200)) == {"workers": 2, "on-demand": 1}
    assert scenario.condition("DeadlineAtRisk").message.startswith("on-demand nodes stand in for missing spot nodes")


def test_without_slack_all_workers_move_and_spot_workers_stay_until_others_run() -> None:
    scenario = a_scenario("6h10m")
    decision = scenario.decide()
    assert replicas(decision) == {"workers": 2, "on-demand": 2}
    condition = scenario.condition("DeadlineAtRisk")
    assert (condition.status, condition.reason) == ("True", "NoSlackLeft")
    why = "about 10 min 00 s of slack is too little for spot nodes: all workers move to on-demand nodes"
    assert condition.message == why
    scenario.has_pods(workers=2)
    assert scenario.status.pinned is not None
    template = template_hashes(scenario.status.pinned)[ON_DEMAND_GROUP]
    changes: dict[str, Any] = {"group": ON_DEMAND_GROUP, "template": template}
    paid = [replace(pod, name=f"{pod.name}-paid", **changes) for pod in scenario.observed.workers]
    scenario.observe(pods=(*scenario.observed.pods, *paid[:1]))
    assert replicas(scenario.decide()) == {"workers": 1, "on-demand": 2}
    scenario.observe(pods=(scenario.observed.pods[0], *paid))
    assert replicas(scenario.decide()) == {"workers": 0, "on-demand": 2}
    assert scenario.condition("ClusterReady").reason == "Running"


def test_deadline_that_cannot_be_met_is_said_with_what_to_do() -> None:
    scenario = a_scenario("5h")
    condition = scenario.condition("DeadlineAtRisk")
    assert (condition.status, condition.reason) == ("True", "TooLate")
    assert condition.message == (
        "training ends about 1 h 00 min late even on on-demand nodes: set a later deadline or more workers, or suspend "
        "the job"
    )
    assert replicas(scenario.decide()) == {"workers": 2, "on-demand": 2}


def test_spot_job_is_told_when_its_slack_is_used_up() -> None:
    scenario = a_scenario("6h10m", capacity="spot")
    assert replicas(scenario.decide()) == {"workers": 2}
    assert scenario.condition("DeadlineAtRisk").message.endswith("set capacity: spot-then-on-demand")


def test_before_the_speed_is_known_on_demand_after_decides() -> None:
    scenario = new_scenario(workers=SPOT_THEN_ON_DEMAND, deadline="20h")
    scenario.observe(created=NOW)
    scenario.has_children()
    scenario.has_pods(workers=1, pending=1)
    scenario.supervisor_reports()
    assert replicas(scenario.decide(after=601)) == {"workers": 2, "on-demand": 1}
    assert scenario.condition("DeadlineAtRisk").reason == "NotMeasured"


def test_speed_outlives_its_group_and_small_changes_are_not_written() -> None:
    scenario = a_scenario("20h")
    deadline = scenario.status.deadline
    assert deadline is not None
    assert (deadline.seconds_per_step, deadline.measured_workers) == (360.0, 2)
    scenario.trains(step=41, etaSeconds=59 * 365.0, **MEASURED)
    scenario.decide()
    lose_a_worker(scenario)
    scenario.decide()
    assert scenario.status.deadline == deadline


def test_conditions_go_with_the_fields() -> None:
    scenario = a_scenario("20h")
    scenario.edit(a_cluster_job(workers=SPOT_THEN_ON_DEMAND))
    scenario.decide()
    assert "DeadlineAtRisk" not in [each.type for each in scenario.status.conditions]
    assert scenario.status.deadline is None


def test_deadline_in_the_past_is_refused_before_pods_are_made() -> None:
    scenario = Scenario(a_cluster_job(deadline="2020-01-31T18:00:00Z"))
    scenario.observe(created=NOW)
    with pytest.raises(StalledError, match=r"spec.deadline: 2020-01-31T18:00:00Z is in the past: give a later time"):
        scenario.decide()


def test_change_of_the_limits_keeps_the_pods() -> None:
    scenario = a_scenario("20h")
    scenario.settings = SETTINGS
    before = scenario.status.pinned
    scenario.edit(a_cluster_job(workers=SPOT_THEN_ON_DEMAND, deadline="30h", maxCost="100 USD"))
    assert scenario.decide().command == ""
    assert scenario.status.pinned == before


def test_job_is_not_late_while_on_demand_workers_start_in_time() -> None:
    scenario = a_scenario("6h10m")
    scenario.decide()
    assert scenario.status.pinned is not None
    template = template_hashes(scenario.status.pinned)[ON_DEMAND_GROUP]
    changes: dict[str, Any] = {"group": ON_DEMAND_GROUP, "template": template, "phase": "Pending", "ready": False}
    starting = [replace(pod, name=f"{pod.name}-paid", **changes) for pod in scenario.observed.workers]
    scenario.observe(pods=(*scenario.observed.pods, *starting))
    scenario.supervisor_reports(step=40, etaSeconds=6 * HOUR, **MEASURED)
    assert replicas(scenario.decide(after=540)) == {"workers": 2, "on-demand": 2}
    assert scenario.condition("DeadlineAtRisk").reason == "NoSlackLeft"
    scenario.decide(after=120)
    assert scenario.condition("DeadlineAtRisk").reason == "TooLate"


def test_in_a_queue_the_condition_says_that_the_queue_decides() -> None:
    scenario = new_scenario(
        workers=SPOT_THEN_ON_DEMAND, deadline="6h10m", cluster={"provider": "none", "queueName": "team"}
    )
    scenario.observe(created=NOW)
    scenario.trains(step=40, etaSeconds=6 * HOUR, **MEASURED)
    assert replicas(scenario.decide()) == {"workers": 2, "on-demand": 0}, "no worker moves"
    condition = scenario.condition("DeadlineAtRisk")
    assert (condition.status, condition.reason) == ("True", "NoSlackLeft")
    assert "the queue team decides which nodes the workers get" in condition.message
    assert "move" not in condition.message
    scenario = new_scenario(
        workers=SPOT_THEN_ON_DEMAND, deadline="20h", cluster={"provider": "none", "queueName": "team"}
    )
    scenario.observe(created=NOW)
    scenario.trains(step=40, etaSeconds=6 * HOUR, **MEASURED)
    scenario.decide()
    lose_a_worker(scenario)
    scenario.decide(after=600)
    assert scenario.condition("DeadlineAtRisk").message.startswith(
        "the queue team decides which nodes the workers get, with about 13 h"
    )
