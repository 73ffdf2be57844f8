"""Decisions, one transition after the other, on a clock that the tests turn."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spotune.job import FinetuneJobStatus
from spotune_operator.decide import decide, stalled
from spotune_operator.errors import ProviderError, StalledError, StorageClassError
from spotune_operator.nodes import NodeView
from spotune_operator.observed import Observed
from spotune_operator.pending import Trouble
from spotune_operator.rendered import render
from spotune_operator.settings import Settings
from tests.operator.moments import (
    NOW,
    SETTINGS,
    Life,
    a_cluster_job,
    a_life,
    a_training_life,
    cluster_of,
    replicas,
)

SPOT_THEN_ON_DEMAND = {"count": 2, "min": 1, "capacity": "spot-then-on-demand", "onDemandAfter": "10m"}


# From nothing to training


def test_new_job_gets_all_children_and_no_workers() -> None:
    decision = Life(a_cluster_job()).decide()
    kinds = [manifest["kind"] for manifest in decision.apply]
    assert kinds == ["PersistentVolumeClaim", "ConfigMap", "NetworkPolicy", "RayCluster"]
    assert replicas(decision) == {"workers": 0}
    assert cluster_of(decision)["suspend"] is False, "KubeRay ends a suspension only when it is told so"


def test_cluster_in_a_queue_is_suspended_by_kueue_alone() -> None:
    decision = Life(a_cluster_job(cluster={"queueName": "gpu"})).decide()
    assert "suspend" not in cluster_of(decision)


def test_workers_are_asked_for_when_preflight_has_passed() -> None:
    life = a_life()
    life.has_children()
    life.has_pods()
    life.supervisor_says("Starting", "preflight", passed=False)
    assert replicas(life.decide()) == {"workers": 0}
    assert (life.status.phase, life.condition("ClusterReady").reason) == ("Preflight", "NoWorkersYet")
    life.supervisor_says("Starting", passed=True)
    assert replicas(life.decide()) == {"workers": 2}
    assert life.is_true("PreflightPassed")


def test_failed_preflight_is_said_and_keeps_gpus_away() -> None:
    life = a_life()
    life.has_children()
    life.has_pods()
    checks = [{"name": "storage-space", "status": "failed", "message": "needs 40 GiB, 10 GiB are free"}]
    life.supervisor_says("Starting", "preflight", passed=False, checks=checks)
    assert replicas(life.decide()) == {"workers": 0}
    stalled = life.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "PreflightFailed")
    assert "needs 40 GiB" in stalled.message
    life.supervisor_says("Starting", passed=True)
    life.decide()
    assert not life.is_true("Stalled")


def test_data_is_prepared_before_workers_are_asked_for() -> None:
    life = a_life(dataset={"prepare": {"source": "s3://bucket/raw"}, "prompt": "{q}", "completion": "{a}"})
    life.has_children()
    life.has_pods()
    life.supervisor_says("Preparing", message="prepared 1,000 rows, 1 of 9 parts")
    assert replicas(life.decide()) == {"workers": 0}
    assert life.condition("DataPrepared").message == "prepared 1,000 rows, 1 of 9 parts"
    life.supervisor_says("WaitingForWorkers")
    assert replicas(life.decide()) == {"workers": 2}


def test_a_lost_head_does_not_take_the_workers_away() -> None:
    life = a_training_life()
    life.has_pods(head=False, workers=2)
    life.see(reading=None)
    assert replicas(life.decide()) == {"workers": 2}
    assert life.is_true("PreflightPassed")
    assert life.condition("Training").status == "False"


def test_training_job_is_ready_and_shows_its_figures() -> None:
    life = a_life()
    life.trains(step=30, etaSeconds=70.0, tokensPerSecond=1000.0, restarts={"workerLost": 2, "hang": 1})
    life.decide()
    status = life.status
    assert (status.phase, status.step, status.total_steps, status.loss) == ("Training", 30, 100, 1.5)
    assert (status.workers, status.restarts.worker_lost, status.restarts.total) == ("2/2", 2, 3)
    assert status.eta == "2027-01-15T08:01:10Z"
    assert life.is_true("Ready")
    assert not life.is_true("Reconciling")
    assert not life.is_true("Stalled")


def test_checkpoint_is_healthy_once_there_is_one() -> None:
    life = a_training_life()
    assert life.condition("CheckpointHealthy").status == "Unknown"
    life.trains(step=60, lastCheckpoint={"step": 50, "time": NOW})
    life.decide()
    assert life.is_true("CheckpointHealthy")
    assert life.status.last_checkpoint is not None
    assert (life.status.last_checkpoint.step, life.status.last_checkpoint.time) == (50, "2027-01-15T08:00:00Z")


def test_the_same_moment_again_changes_nothing() -> None:
    life = a_training_life()
    first, second = life.decide(), life.decide()
    assert first.apply == second.apply
    assert first.status == second.status


# What an operator does not know


def test_restarted_operator_says_nothing_new_before_it_has_asked() -> None:
    life = a_training_life()
    before = life.status
    life.see(reading=None)
    life.has_pods(workers=2)
    life.decide()
    assert life.status.phase == before.phase == "Training"
    assert life.condition("Training").status == "True"


def test_silent_supervisor_is_unknown_and_nothing_is_restarted() -> None:
    life = a_training_life()
    life.is_silent(since=life.now)
    life.decide(after=10)
    assert life.condition("Training").status == "True", "a short silence means nothing"
    decision = life.decide(after=SETTINGS.unreachable_seconds)
    training = life.condition("Training")
    assert (training.status, training.reason) == ("Unknown", "SupervisorUnreachable")
    assert life.condition("Ready").status == "Unknown"
    assert (decision.delete, decision.force_delete, decision.ask) == ([], [], "")
    assert replicas(decision) == {"workers": 2}


def test_figures_of_a_silent_supervisor_stay_but_promise_no_end() -> None:
    life = a_training_life()
    life.trains(step=40, etaSeconds=60.0)
    life.decide()
    life.is_silent(since=life.now - SETTINGS.unreachable_seconds)
    life.decide()
    assert (life.status.step, life.status.eta) == (40, "")


def test_words_of_a_driver_that_is_gone_are_not_taken_for_training() -> None:
    life = a_training_life()
    life.trains(step=40, ageSeconds=45.0, etaSeconds=60.0, tokensPerSecond=1000.0)
    life.decide()
    assert (life.status.phase, life.condition("Training").reason) == ("Recovering", "Recovering")
    assert not life.is_true("Ready")
    assert (life.status.step, life.status.eta, life.status.tokens_per_second) == (40, "", None)
    life.trains(step=41, ageSeconds=0.3)
    life.decide()
    assert life.is_true("Training")


# Ends


def test_trained_job_gives_its_workers_back_at_once_and_the_head_later() -> None:
    life = a_training_life()
    life.supervisor_says("Done", "trained", step=100)
    assert replicas(life.decide()) == {"workers": 0}
    assert life.status.phase == "Complete"
    assert life.is_true("Complete")
    assert life.is_true("Ready")
    assert life.status.output.startswith("pvc://spotune-job/")
    decision = life.decide(after=301)
    assert [child.kind for child in decision.delete] == ["RayCluster"]
    assert "RayCluster" not in {manifest["kind"] for manifest in decision.apply}


def test_complete_stays_complete_when_the_cluster_is_gone() -> None:
    life = a_training_life()
    life.supervisor_says("Done", "trained", step=100)
    life.decide()
    life.see(children={}, pods=(), reading=None)
    decision = life.decide(after=1000)
    assert life.status.phase == "Complete"
    assert "RayCluster" not in {manifest["kind"] for manifest in decision.apply}
    assert decision.again_after is None


def test_kept_cluster_is_left_alone() -> None:
    life = a_life(cleanup={"cluster": "keep"})
    life.trains()
    life.supervisor_says("Done", "trained", step=100)
    decision = life.decide(after=10_000)
    assert decision.delete == []
    assert "RayCluster" not in {manifest["kind"] for manifest in decision.apply}


def test_longer_training_goes_on_after_the_end() -> None:
    life = a_training_life()
    life.supervisor_says("Done", "trained", step=100)
    life.decide()
    life.see(children={}, pods=(), reading=None)
    life.edit(a_cluster_job(training={"epochs": 4, "globalBatchSize": 96}))
    decision = life.decide(after=1000)
    assert cluster_of(decision)["workerGroupSpecs"][0]["replicas"] == 2
    assert life.status.phase == "Provisioning"
    assert not life.is_true("Complete")


def test_failed_job_says_why_and_stays_failed() -> None:
    life = a_training_life()
    life.supervisor_says("Failed", "failed", why="spec.dataset.prompt: no column 'question'")
    life.decide()
    assert life.status.phase == "Failed"
    assert life.condition("Failed").message == "spec.dataset.prompt: no column 'question'"
    assert life.condition("Stalled").reason == "Failed"
    life.see(children={}, pods=(), reading=None)
    life.decide(after=1000)
    assert life.condition("Failed").message == "spec.dataset.prompt: no column 'question'"


def test_failed_job_is_tried_again_when_its_spec_changes() -> None:
    life = a_training_life()
    life.supervisor_says("Failed", "failed", why="broken")
    life.decide()
    life.edit(a_cluster_job(retry={"appFailureLimit": 5}))
    life.decide()
    assert not life.is_true("Failed"), "the supervisor has not read the new file yet: what it says is about the old one"
    life.supervisor_says("Failed", "failed", why="broken again")
    life.decide()
    assert life.is_true("Failed")


def test_failed_job_whose_cluster_is_gone_starts_again_when_its_spec_changes() -> None:
    life = a_training_life()
    life.supervisor_says("Failed", "failed", why="broken")
    life.decide()
    life.see(children={}, pods=(), reading=None)
    life.edit(a_cluster_job(cleanup={"after": "1m"}))
    decision = life.decide()
    assert "RayCluster" in {manifest["kind"] for manifest in decision.apply}
    assert not life.is_true("Failed")


# Suspension


def test_suspended_job_commits_before_its_pods_go() -> None:
    life = a_training_life()
    life.edit(a_cluster_job(suspend=True))
    decision = life.decide()
    assert decision.ask == "stop"
    assert cluster_of(decision)["suspend"] is False
    assert (life.status.phase, life.condition("Suspended").status) == ("Suspending", "Unknown")
    life.supervisor_says("Training", "stopped")
    decision = life.decide()
    assert cluster_of(decision)["suspend"] is True
    life.see(pods=(), reading=None)
    life.has_children(suspended=True)
    life.decide()
    assert (life.status.phase, life.is_true("Suspended")) == ("Suspended", True)
    assert not life.is_true("Reconciling")


def test_silent_supervisor_does_not_hold_up_a_suspension() -> None:
    life = a_training_life()
    life.edit(a_cluster_job(suspend=True))
    life.is_silent(since=life.now)
    assert cluster_of(life.decide(after=5))["suspend"] is False
    assert cluster_of(life.decide(after=SETTINGS.unreachable_seconds))["suspend"] is True


def test_resumed_job_goes_on_with_all_workers() -> None:
    life = a_training_life()
    life.edit(a_cluster_job(suspend=True))
    life.see(pods=(), reading=None)
    life.has_children(suspended=True)
    life.decide()
    life.edit(a_cluster_job())
    decision = life.decide(after=5000)
    assert cluster_of(decision)["suspend"] is False
    assert replicas(decision) == {"workers": 2}
    assert not life.is_true("NotProgressing"), "the time of standing still does not count"


def test_suspension_that_is_taken_back_starts_the_supervisor_again() -> None:
    life = a_training_life()
    life.supervisor_says("Training", "stopping")
    assert life.decide().ask == "start"


def test_job_that_is_born_suspended_has_no_pods() -> None:
    decision = Life(a_cluster_job(suspend=True)).decide()
    assert cluster_of(decision)["suspend"] is True


# Changes of a running job


def test_more_workers_change_nothing_but_replicas() -> None:
    life = a_training_life()
    before = cluster_of(life.decide())
    life.edit(a_cluster_job(workers={"count": 3, "min": 1}))
    after = cluster_of(life.decide())
    assert after["workerGroupSpecs"][0].pop("replicas") == 3
    assert after["workerGroupSpecs"][0].pop("maxReplicas") == 3
    before["workerGroupSpecs"][0].pop("replicas")
    before["workerGroupSpecs"][0].pop("maxReplicas")
    assert after == before


@pytest.mark.parametrize(
    "sections",
    [
        {"checkpoint": {"keep": 5}},
        {"retry": {"appFailureLimit": 9}},
        {"training": {"epochs": 9, "globalBatchSize": 96}},
        {"execution": {"microBatchSize": 2}},
        {"storage": {"storageClassName": "shared", "size": "20Gi"}},
        {"workers": {"count": 2, "min": 2}},
    ],
)
def test_change_of_how_restarts_no_pod(sections: dict[str, object]) -> None:
    life = a_training_life()
    before = cluster_of(life.decide())
    life.edit(a_cluster_job(**sections))
    decision = life.decide()
    assert cluster_of(decision) == before
    assert decision.ask == ""
    assert life.status.phase == "Training"


def test_new_image_commits_then_replaces_all_pods() -> None:
    life = a_training_life()
    life.edit(a_cluster_job(cluster={"provider": "none", "image": "mine:2"}))
    decision = life.decide()
    assert decision.ask == "stop"
    assert life.status.phase == "Restarting"
    life.supervisor_says("Training", "stopped")
    assert cluster_of(life.decide())["suspend"] is True
    life.has_children(suspended=True)
    life.has_pods(workers=0)
    life.see(pods=tuple(replace(pod, deleting_since=life.now) for pod in life.seen.pods), reading=None)
    assert cluster_of(life.decide())["suspend"] is True, "not before the last pod is gone"
    life.see(pods=())
    decision = life.decide()
    assert cluster_of(decision)["suspend"] is False
    head = cluster_of(decision)["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["image"] == "mine:2"


def test_wrong_image_is_stalled_and_a_corrected_one_replaces_the_pods_at_once() -> None:
    life = a_life(cluster={"provider": "none", "image": "wrong:1"})
    life.has_children()
    life.has_pods(head=True)
    trouble = Trouble("ErrImagePull", "container ray-head: image wrong:1 cannot be pulled: not found")
    life.see(pods=tuple(replace(pod, phase="Pending", ready=False, trouble=trouble) for pod in life.seen.pods))
    life.decide()
    stalled = life.condition("Stalled")
    assert (life.status.phase, stalled.status, stalled.reason) == ("Stalled", "True", "ErrImagePull")
    assert stalled.message == trouble.message
    life.edit(a_cluster_job(cluster={"provider": "none", "image": "right:1"}))
    decision = life.decide()
    assert decision.ask == ""
    assert cluster_of(decision)["suspend"] is True
    life.see(pods=())
    life.decide()
    assert not life.is_true("Stalled")


def test_operator_with_other_defaults_disturbs_no_running_job() -> None:
    life = a_training_life()
    before = cluster_of(life.decide())
    life.settings = Settings(image="spotune/trainer:2", ray_version="9.9.9")
    decision = life.decide()
    assert cluster_of(decision) == before
    assert life.status.phase == "Training"


def test_pinned_image_outlasts_a_change_of_the_spec() -> None:
    life = a_training_life()
    life.settings = Settings(image="spotune/trainer:2")
    life.edit(a_cluster_job(head={"resources": {"requests": {"cpu": "2"}}}))
    decision = life.decide()
    assert cluster_of(decision)["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] == "spotune/trainer:1"


def test_pin_is_what_was_rendered() -> None:
    life = a_training_life()
    assert life.status.pinned is not None
    pinned = json.loads(life.status.pinned.ray_cluster)
    assert pinned["headGroupSpec"] == cluster_of(life.decide())["headGroupSpec"]


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
    from spotune_operator.pinned import template_hashes

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
