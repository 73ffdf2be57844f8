"""Decisions with missing nodes, capacity or progress, and about specs that cannot be applied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotune.custom_resource.pod_problems import PodProblem
from spotune.job import FinetuneJobStatus
from spotune_operator.errors import ProviderError, StalledError, StorageClassError
from spotune_operator.observe.nodes import NodeView
from spotune_operator.observe.state import Observed
from spotune_operator.reconcile.decide import decide, decide_stalled, stalled
from spotune_operator.reconcile.desired_children import render
from tests.operator.support.scenarios import (
    Scenario,
    a_cluster_job,
    new_scenario,
    replicas,
    training_scenario,
)

SPOT_THEN_ON_DEMAND = {"count": 2, "min": 1, "capacity": "spot-then-on-demand", "onDemandAfter": "10m"}


# Capacity


def test_on_demand_worker_replaces_an_overdue_spot_worker() -> None:
    scenario = new_scenario(workers=SPOT_THEN_ON_DEMAND)
    scenario.has_children()
    scenario.has_pods(workers=1, pending=1)
    scenario.supervisor_reports()
    decision = scenario.decide()
    assert replicas(decision) == {"workers": 2, "on-demand": 0}
    assert decision.requeue_after is not None
    assert decision.requeue_after <= 600.2
    assert replicas(scenario.decide(after=601)) == {"workers": 2, "on-demand": 1}


def test_on_demand_worker_is_removed_when_spot_is_back() -> None:
    scenario = new_scenario(workers=SPOT_THEN_ON_DEMAND)
    scenario.has_children()
    scenario.has_pods(workers=1, pending=1)
    scenario.supervisor_reports()
    assert replicas(scenario.decide(after=601)) == {"workers": 2, "on-demand": 1}
    scenario.has_pods(workers=2)
    assert replicas(scenario.decide()) == {"workers": 2, "on-demand": 0}


def test_spot_job_waits_forever() -> None:
    scenario = new_scenario()
    scenario.has_children()
    scenario.has_pods(workers=1, pending=1)
    scenario.supervisor_reports()
    assert replicas(scenario.decide(after=100_000)) == {"workers": 2}


def test_workers_that_have_lost_their_head_may_train_until_the_next_driver_knows() -> None:
    scenario = training_scenario()
    scenario.trains(step=40, ageSeconds=0.3)
    scenario.decide()
    scenario.has_pods(head=False, workers=2)
    scenario.decide()
    training = scenario.condition("Training")
    assert (training.status, training.reason) == ("Unknown", "NoDriver")
    assert "the workers train on" in training.message
    assert scenario.condition("Ready").status == "Unknown"
    scenario.has_pods(workers=2)
    scenario.trains(step=40, phase="Loading", ageSeconds=0.3)  # the last word of the driver that is lost
    scenario.decide()
    assert scenario.condition("Training").reason == "Loading"
    for reported in ({"phase": "Starting"}, {"phase": "WaitingForWorkers", "adopting": True}):
        scenario.trains(step=40, ageSeconds=0.3, **reported)
        scenario.decide()
        training = scenario.condition("Training")
        assert (training.status, training.reason) == ("Unknown", "NoDriver"), reported
    scenario.trains(step=60, ageSeconds=0.3)
    scenario.decide()
    assert scenario.is_true("Ready")


@pytest.mark.parametrize("state", ["preflight", "waiting", "running"])
def test_workers_that_report_without_a_driver_train(state: str) -> None:
    scenario = training_scenario()
    scenario.trains(step=40, ageSeconds=0.3)
    scenario.decide()
    scenario.has_pods(workers=2)
    message = "the head is being replaced; the workers train on"
    reported: dict[str, Any] = {"adopting": True, "message": message, "ageSeconds": 0.5, "supervisorSeconds": 3.0}
    scenario.supervisor_reports("Training", state, step=75, silentSeconds=0.5, **reported)
    scenario.decide()
    assert (scenario.status.phase, scenario.status.step) == ("Training", 75)
    training = scenario.condition("Training")
    assert (training.status, training.message) == ("True", message)
    assert scenario.is_true("Ready")


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_are_lost_with_their_head_do_not_train(workers: int) -> None:
    scenario = training_scenario()
    scenario.trains(step=40, ageSeconds=0.3)
    scenario.decide()
    scenario.has_pods(head=False, workers=workers)
    scenario.decide()
    scenario.has_pods(workers=2)
    scenario.trains(step=40, phase="WaitingForWorkers", ageSeconds=0.3)
    scenario.decide()
    training = scenario.condition("Training")
    assert (training.status, training.reason) == ("False", "WaitingForWorkers")
    assert not scenario.is_true("Ready")


def test_gpu_seconds_are_counted_by_capacity() -> None:
    scenario = new_scenario(workers=SPOT_THEN_ON_DEMAND)
    scenario.trains()
    spot, other = scenario.observed.workers
    head = scenario.observed.head
    assert head is not None
    scenario.observe(pods=(head, spot, replace(other, group="on-demand", template=_on_demand_template(scenario))))
    scenario.decide(after=100)
    used = scenario.status.gpu_seconds
    assert (used.spot, used.on_demand) == (100, 100)
    scenario.decide(after=50)
    assert scenario.status.gpu_seconds.spot == 150


def test_gpu_seconds_of_many_passes_are_those_of_one() -> None:
    """The status has whole seconds only."""
    scenario = training_scenario()
    scenario.decide(after=100)
    begin = scenario.status.gpu_seconds
    for _ in range(100):
        scenario.decide(after=10.7)
    used = scenario.status.gpu_seconds
    assert used.spot - begin.spot == pytest.approx(2 * 1070, abs=2)


def test_gpu_seconds_are_updated_once_a_poll_interval() -> None:
    scenario = training_scenario()
    scenario.decide(after=100)
    before = scenario.status.gpu_seconds
    scenario.decide(after=1)
    assert scenario.status.gpu_seconds == before


def _on_demand_template(scenario: Scenario) -> str:
    from spotune_operator.reconcile.pinned import template_hashes

    assert scenario.status.pinned is not None
    return template_hashes(scenario.status.pinned)["on-demand"]


# Progress


def test_missing_progress_is_reported_with_its_reason() -> None:
    scenario = training_scenario()
    scenario.has_pods(
        workers=0, pending=2, problem=PodProblem("Unschedulable", "0/3 nodes are available: 3 Insufficient gpu.")
    )
    scenario.supervisor_reports("WaitingForWorkers", step=10)
    scenario.decide(after=60)
    assert not scenario.is_true("NotProgressing")
    decision = scenario.decide(after=1800)
    found = scenario.condition("NotProgressing")
    assert (found.status, found.reason) == ("True", "Unschedulable")
    assert "Insufficient gpu" in found.message
    assert decision.delete == []


def test_repeated_steps_are_no_progress() -> None:
    scenario = training_scenario()
    scenario.trains(step=50)
    scenario.decide()
    for step in (20, 40, 49):
        scenario.trains(step=step)
        scenario.decide(after=700)
    assert scenario.is_true("NotProgressing")
    scenario.trains(step=51)
    scenario.decide()
    assert not scenario.is_true("NotProgressing")


def test_preparation_of_data_is_progress() -> None:
    scenario = new_scenario(dataset={"prepare": {"source": "s3://bucket/raw"}, "prompt": "{q}", "completion": "{a}"})
    scenario.has_children()
    scenario.has_pods()
    for part in range(5):
        scenario.supervisor_reports("Preparing", message=f"prepared 1,000 rows, {part} of 9 parts")
        scenario.decide(after=1200)
    assert not scenario.is_true("NotProgressing")


# Specs that cannot be applied


def test_unknown_storage_class_is_refused_by_name() -> None:
    with pytest.raises(StorageClassError, match="nothere does not exist in this cluster; available classes: shared"):
        Scenario(a_cluster_job(storage={"storageClassName": "nothere"})).decide()


def test_missing_default_class_is_refused() -> None:
    with pytest.raises(StorageClassError, match="has no default class"):
        Scenario(a_cluster_job(storage={"size": "10Gi"})).decide()


def test_class_for_one_node_is_refused() -> None:
    classes = {"gp3": {"metadata": {"name": "gp3", "annotations": {}}, "provisioner": "ebs.csi.aws.com"}}
    scenario = Scenario(a_cluster_job(storage={"storageClassName": "gp3"}), observed=Observed(storage_classes=classes))
    with pytest.raises(StorageClassError, match="ReadWriteMany"):
        scenario.decide()


def test_nodes_of_two_clouds_are_refused() -> None:
    scenario = Scenario(a_cluster_job(cluster={"provider": "auto"}))
    scenario.observe(provider_ids=("azure:///a", "aws:///b"))
    with pytest.raises(ProviderError, match="name one of them"):
        scenario.decide()


def test_provider_of_the_nodes_stays_when_the_nodes_are_gone() -> None:
    scenario = Scenario(a_cluster_job(cluster={"provider": "auto"}))
    scenario.observe(provider_ids=("azure:///a",))
    scenario.decide()
    scenario.observe(provider_ids=())
    scenario.decide()
    assert scenario.status.pinned is not None
    assert scenario.status.pinned.provider == "aks"


def test_stalled_job_keeps_its_metrics() -> None:
    scenario = training_scenario()
    error = StalledError("spec.workers.podTemplate", "is wrong")
    status = stalled(scenario.status, error, generation=2, now=scenario.now)
    assert (status.phase, status.step, status.observed_generation) == ("Stalled", 10, 2)
    found = {condition.type: condition for condition in status.conditions}
    assert found["Stalled"].message == "spec.workers.podTemplate: is wrong"
    assert (found["Stalled"].reason, found["Ready"].status) == ("InvalidSpec", "False")


def test_stalled_job_is_told_that_the_cloud_reclaims_a_node() -> None:
    scenario = training_scenario()
    scenario.observe(nodes={"n1": NodeView("n1"), "n2": NodeView("n2", reclaimed=True)})
    noticed = {}
    for heeds in (True, False):
        decision = decide_stalled(
            StalledError("spec.workers.podTemplate", "is wrong"),
            generation=2,
            previous=scenario.status,
            observed=scenario.observed,
            now=scenario.now,
            settings=replace(scenario.settings, heed_preemption=heeds),
        )
        noticed[heeds] = [pod.name for pod in decision.delete_gracefully]
        assert (decision.status.phase, decision.apply) == ("Stalled", [])
        assert decision.requeue_after == scenario.settings.rejected_retry_seconds, "no event tells of other nodes"
    assert noticed == {True: ["worker-0", "worker-1"], False: []}


def test_rejected_child_is_reported_with_the_servers_message() -> None:
    scenario = new_scenario()
    scenario.observe(refused={"PersistentVolumeClaim": "exceeded quota: storage, requested: 200Gi, limited: 100Gi"})
    decision = scenario.decide()
    assert "exceeded quota" in scenario.condition("Stalled").message
    assert scenario.condition("StorageReady").reason == "Refused"
    assert decision.requeue_after is not None, "a quota may be raised"


# Pods


@pytest.mark.parametrize(
    ("workers", "pending", "problem", "status", "message"),
    [
        (4, 0, None, "True", "4 of 4 workers run"),
        (3, 1, None, "True", "3 of 4 workers run, waiting for 1 more"),
        (3, 0, None, "True", "3 of 4 workers run, waiting for 1 more"),
        (3, 1, "0/3 nodes are available", "True", "3 of 4 workers run; 0/3 nodes are available"),
        (1, 3, None, "False", "1 of 4 workers run, waiting for 3 more"),
        (1, 3, "0/3 nodes are available", "False", "0/3 nodes are available"),
    ],
)
def test_cluster_ready_says_how_many_workers_are_missing_and_why(
    workers: int, pending: int, problem: str | None, status: str, message: str
) -> None:
    scenario = training_scenario(workers={"count": 4, "min": 2})
    scenario.has_pods(workers=workers, pending=pending)
    if problem is not None:
        head, *others = scenario.observed.pods
        waiting = [pod if pod.runs else replace(pod, problem=PodProblem("Unschedulable", problem)) for pod in others]
        scenario.observe(pods=(head, *waiting))
    scenario.decide()
    found = scenario.condition("ClusterReady")
    assert (found.status, found.message) == (status, message)


def test_suspended_job_names_the_command_that_resumes_it() -> None:
    scenario = training_scenario(suspend=True)
    scenario.observe(pods=(), poll=None)
    scenario.decide()
    resume = "run `spotune resume job` or set suspend: false to continue from the last commit"
    assert scenario.condition("Suspended").message == f"all pods are deleted; {resume}"


# Nodes


def test_pod_on_a_dead_node_is_force_deleted_after_its_grace_period() -> None:
    scenario = training_scenario()
    lost = replace(scenario.observed.workers[0], deleting_since=scenario.now, grace_seconds=30.0)
    others = [pod for pod in scenario.observed.pods if pod.uid != lost.uid]
    dead = NodeView(
        name="n2", provider_id="", ready=False, not_ready_since=scenario.now - 60, unschedulable=False,
        gpu_capacity=1, gpu_allocatable=1, labels={}, created=0.0,
    )  # fmt: skip
    scenario.observe(pods=(*others, lost), nodes={"n2": dead})
    decision = scenario.decide()
    assert decision.force_delete == []
    assert decision.requeue_after is not None
    assert scenario.decide(after=36).force_delete == [lost]


# Conditions in general


def test_transition_time_changes_with_the_status_alone() -> None:
    scenario = training_scenario()
    since = scenario.condition("Ready").last_transition_time
    scenario.trains(step=20)
    scenario.decide(after=60)
    assert scenario.condition("Ready").last_transition_time == since
    scenario.polls_fail(since=scenario.now - 100)
    scenario.decide(after=60)
    assert scenario.condition("Ready").last_transition_time > since


def test_every_condition_has_the_observed_generation() -> None:
    scenario = training_scenario()
    scenario.edit(a_cluster_job(checkpoint={"keep": 7}))
    scenario.decide()
    assert {condition.observed_generation for condition in scenario.status.conditions} == {2}
    assert scenario.status.observed_generation == 2


def test_decision_needs_no_earlier_status_of_this_version() -> None:
    scenario = training_scenario()
    decision = decide(
        render(scenario.job, "uid-1", None, (), scenario.settings),
        generation=1,
        previous=FinetuneJobStatus.model_validate({"phase": "Training", "somethingNew": 1}),
        observed=scenario.observed,
        now=scenario.now,
        settings=scenario.settings,
    )
    assert decision.status.phase == "Training"
