"""Decisions about a job that is suspended, changed, or run by an operator of another version."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spotune_operator.observe.pod_problems import Trouble
from spotune_operator.settings import Settings
from tests.operator.support.scenarios import (
    SETTINGS,
    Life,
    a_cluster_job,
    a_life,
    a_training_life,
    cluster_of,
    replicas,
)

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


def test_job_in_a_queue_gives_its_cluster_back_for_only_kueue_suspends() -> None:
    queue = {"provider": "none", "queueName": "team"}
    life = a_training_life(cluster=queue)
    life.edit(a_cluster_job(cluster=queue, suspend=True))
    assert life.decide().ask == "stop"
    life.supervisor_says("Training", "stopped")
    decision = life.decide()
    assert [child.kind for child in decision.delete] == ["RayCluster"]
    life.see(children={}, pods=(), reading=None)
    assert "RayCluster" not in {manifest["kind"] for manifest in life.decide().apply}
    assert life.is_true("Suspended")
    life.edit(a_cluster_job(cluster=queue))
    assert replicas(life.decide()) == {"workers": 2}


def test_job_that_kueue_makes_wait_is_not_stopped() -> None:
    life = a_training_life(cluster={"provider": "none", "queueName": "team"})
    life.has_children(suspended=True)
    decision = life.decide()
    assert (decision.ask, decision.delete) == ("", [])


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
