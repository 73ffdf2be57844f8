"""Decisions about a job in a queue of Kueue."""

from __future__ import annotations

from dataclasses import replace

from spotune.job import QueueStatus
from spotune.units.timestamps import rfc3339
from spotune_operator.kueue.partial_admission import PATIENCE_SECONDS
from tests.operator.support.scenarios import (
    NOW,
    Scenario,
    a_cluster_job,
    cluster_of,
    new_scenario,
    replicas,
    training_scenario,
)

WORKERS = 4


def queued_scenario(minimum: int = 1, **workers: object) -> Scenario:
    return training_scenario(
        cluster={"provider": "none", "queueName": "team"}, workers={"count": WORKERS, "min": minimum, **workers}
    )


def has_admitted(scenario: Scenario, admitted: int, asked: int) -> None:
    """Kueue has removed its gate from some of the workers that the job asks for."""
    scenario.has_pods(workers=admitted, pending=asked - admitted)
    pods = [replace(pod, held_back=pod.component == "workers" and not pod.runs) for pod in scenario.observed.pods]
    scenario.observe(pods=pods)


def test_job_without_quota_for_all_workers_asks_for_fewer_and_says_so() -> None:
    scenario = queued_scenario()
    has_admitted(scenario, admitted=1, asked=WORKERS)
    decision = scenario.decide()
    assert replicas(decision) == {"workers": WORKERS}
    assert decision.requeue_after is not None
    assert decision.requeue_after <= PATIENCE_SECONDS
    assert scenario.condition("ClusterReady").message == "1 of 4 workers run; queue team has no quota for 3 more"
    decision = scenario.decide(after=PATIENCE_SECONDS + 1)
    (group,) = cluster_of(decision)["workerGroupSpecs"]
    names = sorted(pod.name for pod in scenario.observed.pods if pod.held_back)
    assert (group["replicas"], group["scaleStrategy"]) == (2, {"workersToDelete": names[-2:]})
    assert scenario.status.queue == QueueStatus(workers=2, since=rfc3339(scenario.now))


def test_pods_that_wait_for_quota_get_no_on_demand_nodes() -> None:
    scenario = queued_scenario(capacity="spot-then-on-demand", onDemandAfter="1m")
    has_admitted(scenario, admitted=1, asked=2)
    scenario.decide()
    assert replicas(scenario.decide(after=3600))["on-demand"] == 0


def test_preempted_job_waits_for_its_minimum() -> None:
    scenario = queued_scenario(minimum=2)
    scenario.observe(pods=(), poll=None)
    scenario.has_children(suspended=True)
    asked = [replicas(scenario.decide(after=PATIENCE_SECONDS + 1))["workers"] for _ in range(3)]
    assert asked == [2, 2, 2]


def test_a_job_in_no_queue_asks_for_nothing() -> None:
    scenario = training_scenario()
    scenario.decide()
    assert scenario.status.queue is None


def test_a_job_asks_once_its_preflight_has_passed() -> None:
    scenario = Scenario(a_cluster_job(cluster={"provider": "none", "queueName": "team"}), now=NOW)
    scenario.decide()
    assert scenario.status.queue is None


def test_preempted_cluster_that_kueue_cannot_admit_again_is_created_anew() -> None:
    scenario = queued_scenario()
    scenario.has_children(suspended=True, cannot_be_admitted=True)
    assert scenario.decide().delete == [], "its pods commit first"
    scenario.observe(pods=(), poll=None)
    decision = scenario.decide()
    assert [child.kind for child in decision.delete] == ["RayCluster"]
    assert "RayCluster" not in {manifest["kind"] for manifest in decision.apply}
    assert scenario.condition("ClusterReady").message == "the job waits for quota in queue team"
    scenario.observe(children={})
    assert replicas(scenario.decide())["workers"] >= 1
    scenario.has_children(suspended=True)
    assert scenario.decide().delete == [], "it waits for its first admission"


def test_suspended_job_in_a_queue_says_that_its_pods_stop_until_it_continues() -> None:
    scenario = queued_scenario()
    scenario.observe(pods=(), poll=None)
    scenario.has_children(suspended=True)
    suspended = scenario.job.spec.model_copy(update={"suspend": True})
    scenario.edit(scenario.job.model_copy(update={"spec": suspended}))
    for children in (scenario.observed.children, {}):
        scenario.observe(children=children)
        scenario.decide()
        found = scenario.condition("ClusterReady")
        assert (found.reason, found.message) == ("Freed", "the pods stop until the job continues")
        assert scenario.is_true("Suspended")


def test_deadline_asks_the_queue_for_no_more_than_it_has() -> None:
    """Without slack a job in no queue would ask for as many on-demand workers in addition."""
    workers = {"count": WORKERS, "min": 1, "capacity": "spot-then-on-demand"}
    scenario = new_scenario(workers=workers, deadline="6h10m", cluster={"provider": "none", "queueName": "team"})
    scenario.observe(created=NOW)
    scenario.trains(step=40, etaSeconds=6 * 3600, lastCheckpoint={"step": 40, "time": NOW})
    scenario.decide()
    assert replicas(scenario.decide()) == {"workers": WORKERS, "on-demand": 0}
    assert scenario.condition("DeadlineAtRisk").reason == "NoSlackLeft"


def test_job_that_commits_asks_for_no_more_workers() -> None:
    scenario = queued_scenario()
    has_admitted(scenario, admitted=1, asked=WORKERS)
    scenario.decide()
    scenario.decide(after=PATIENCE_SECONDS + 1)
    has_admitted(scenario, admitted=2, asked=2)
    suspended = scenario.job.spec.model_copy(update={"suspend": True})
    scenario.edit(scenario.job.model_copy(update={"spec": suspended}))
    scenario.supervisor_reports(step=20, totalSteps=100)
    decision = scenario.decide(after=60)
    assert (decision.command, replicas(decision)) == ("stop", {"workers": 2})
