"""Decisions where nodes, capacity or progress are missing, or a job asks for what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotune.job import FinetuneJobStatus
from spotune_operator.errors import ProviderError, StalledError, StorageClassError
from spotune_operator.observe.nodes import NodeView
from spotune_operator.observe.pod_problems import Trouble
from spotune_operator.observe.state import Observed
from spotune_operator.reconcile.decide import decide, stalled
from spotune_operator.reconcile.desired_children import render
from tests.operator.support.scenarios import Life, a_cluster_job, a_life, a_training_life, replicas

SPOT_THEN_ON_DEMAND = {"count": 2, "min": 1, "capacity": "spot-then-on-demand", "onDemandAfter": "10m"}


# Capacity


def test_on_demand_worker_takes_the_place_of_one_that_waits_too_long() -> None:
    life = a_life(workers=SPOT_THEN_ON_DEMAND)
    life.has_children()
    life.has_pods(workers=1, pending=1)
    life.supervisor_says()
    decision = life.decide()
    assert replicas(decision) == {"workers": 2, "on-demand": 0}
    assert decision.again_after is not None
    assert decision.again_after <= 600.2
    assert replicas(life.decide(after=601)) == {"workers": 2, "on-demand": 1}


def test_on_demand_worker_goes_when_spot_is_back() -> None:
    life = a_life(workers=SPOT_THEN_ON_DEMAND)
    life.has_children()
    life.has_pods(workers=1, pending=1)
    life.supervisor_says()
    assert replicas(life.decide(after=601)) == {"workers": 2, "on-demand": 1}
    life.has_pods(workers=2)
    assert replicas(life.decide()) == {"workers": 2, "on-demand": 0}


def test_spot_job_waits_for_ever() -> None:
    life = a_life()
    life.has_children()
    life.has_pods(workers=1, pending=1)
    life.supervisor_says()
    assert replicas(life.decide(after=100_000)) == {"workers": 2}


def test_gpu_seconds_are_counted_by_capacity() -> None:
    life = a_life(workers=SPOT_THEN_ON_DEMAND)
    life.trains()
    spot, other = life.seen.workers
    head = life.seen.head
    assert head is not None
    life.see(pods=(head, spot, replace(other, group="on-demand", template=_on_demand_template(life))))
    life.decide(after=100)
    used = life.status.gpu_seconds
    assert (used.spot, used.on_demand) == (100, 100)
    life.decide(after=50)
    assert life.status.gpu_seconds.spot == 150


def test_gpu_seconds_do_not_change_between_two_looks() -> None:
    life = a_training_life()
    life.decide(after=100)
    before = life.status.gpu_seconds
    life.decide(after=1)
    assert life.status.gpu_seconds == before


def _on_demand_template(life: Life) -> str:
    from spotune_operator.reconcile.pinned import template_hashes

    assert life.status.pinned is not None
    return template_hashes(life.status.pinned)["on-demand"]


# Progress


def test_no_new_step_for_long_is_said_with_the_reason() -> None:
    life = a_training_life()
    life.has_pods(
        workers=0, pending=2, trouble=Trouble("Unschedulable", "0/3 nodes are available: 3 Insufficient gpu.")
    )
    life.supervisor_says("WaitingForWorkers", step=10)
    life.decide(after=60)
    assert not life.is_true("NotProgressing")
    decision = life.decide(after=1800)
    found = life.condition("NotProgressing")
    assert (found.status, found.reason) == ("True", "Unschedulable")
    assert "Insufficient gpu" in found.message
    assert decision.delete == []


def test_steps_that_are_done_again_are_no_progress() -> None:
    life = a_training_life()
    life.trains(step=50)
    life.decide()
    for step in (20, 40, 49):
        life.trains(step=step)
        life.decide(after=700)
    assert life.is_true("NotProgressing")
    life.trains(step=51)
    life.decide()
    assert not life.is_true("NotProgressing")


def test_data_that_is_being_prepared_is_progress() -> None:
    life = a_life(dataset={"prepare": {"source": "s3://bucket/raw"}, "prompt": "{q}", "completion": "{a}"})
    life.has_children()
    life.has_pods()
    for part in range(5):
        life.supervisor_says("Preparing", message=f"prepared 1,000 rows, {part} of 9 parts")
        life.decide(after=1200)
    assert not life.is_true("NotProgressing")


# What cannot be


def test_unknown_storage_class_is_refused_by_name() -> None:
    with pytest.raises(StorageClassError, match="nothere does not exist in this cluster; there is shared"):
        Life(a_cluster_job(storage={"storageClassName": "nothere"})).decide()


def test_missing_default_class_is_refused() -> None:
    with pytest.raises(StorageClassError, match="has no default class"):
        Life(a_cluster_job(storage={"size": "10Gi"})).decide()


def test_class_for_one_node_is_refused() -> None:
    classes = {"gp3": {"metadata": {"name": "gp3", "annotations": {}}, "provisioner": "ebs.csi.aws.com"}}
    life = Life(a_cluster_job(storage={"storageClassName": "gp3"}), seen=Observed(storage_classes=classes))
    with pytest.raises(StorageClassError, match="ReadWriteMany"):
        life.decide()


def test_nodes_of_two_clouds_are_refused() -> None:
    life = Life(a_cluster_job(cluster={"provider": "auto"}))
    life.see(provider_ids=("azure:///a", "aws:///b"))
    with pytest.raises(ProviderError, match="name one of them"):
        life.decide()


def test_provider_of_the_nodes_stays_when_the_nodes_are_gone() -> None:
    life = Life(a_cluster_job(cluster={"provider": "auto"}))
    life.see(provider_ids=("azure:///a",))
    life.decide()
    life.see(provider_ids=())
    life.decide()
    assert life.status.pinned is not None
    assert life.status.pinned.provider == "aks"


def test_stalled_job_keeps_its_figures() -> None:
    life = a_training_life()
    error = StalledError("spec.workers.podTemplate", "is wrong")
    status = stalled(life.status, error, generation=2, now=life.now)
    assert (status.phase, status.step, status.observed_generation) == ("Stalled", 10, 2)
    found = {condition.type: condition for condition in status.conditions}
    assert found["Stalled"].message == "spec.workers.podTemplate: is wrong"
    assert (found["Stalled"].reason, found["Ready"].status) == ("InvalidSpec", "False")


def test_refused_child_is_shown_in_the_servers_words() -> None:
    life = a_life()
    life.see(refused={"PersistentVolumeClaim": "exceeded quota: storage, requested: 200Gi, limited: 100Gi"})
    decision = life.decide()
    assert "exceeded quota" in life.condition("Stalled").message
    assert life.condition("StorageReady").reason == "Refused"
    assert decision.again_after is not None, "a quota may be raised"


# Nodes


def test_pod_on_a_dead_node_is_taken_away_after_its_grace() -> None:
    life = a_training_life()
    lost = replace(life.seen.workers[0], deleting_since=life.now, grace_seconds=30.0)
    others = [pod for pod in life.seen.pods if pod.uid != lost.uid]
    dead = NodeView(
        name="n2", provider_id="", ready=False, not_ready_since=life.now - 60, unschedulable=False,
        gpu_capacity=1, gpu_allocatable=1, labels={}, created=0.0,
    )  # fmt: skip
    life.see(pods=(*others, lost), nodes={"n2": dead})
    decision = life.decide()
    assert decision.force_delete == []
    assert decision.again_after is not None
    assert life.decide(after=36).force_delete == [lost]


# Conditions in general


def test_transition_time_changes_with_the_status_alone() -> None:
    life = a_training_life()
    since = life.condition("Ready").last_transition_time
    life.trains(step=20)
    life.decide(after=60)
    assert life.condition("Ready").last_transition_time == since
    life.is_silent(since=life.now - 100)
    life.decide(after=60)
    assert life.condition("Ready").last_transition_time > since


def test_every_condition_says_which_generation_it_is_about() -> None:
    life = a_training_life()
    life.edit(a_cluster_job(checkpoint={"keep": 7}))
    life.decide()
    assert {condition.observed_generation for condition in life.status.conditions} == {2}
    assert life.status.observed_generation == 2


def test_decision_needs_no_earlier_status_of_this_version() -> None:
    life = a_training_life()
    decision = decide(
        render(life.job, "uid-1", None, (), life.settings),
        generation=1,
        previous=FinetuneJobStatus.model_validate({"phase": "Training", "somethingNew": 1}),
        seen=life.seen,
        now=life.now,
        settings=life.settings,
    )
    assert decision.status.phase == "Training"
