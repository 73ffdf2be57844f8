"""Decisions about a job that is suspended, changed, or run by an operator of another version."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spotune.custom_resource.pod_problems import PodProblem
from spotune_operator.settings import Settings
from tests.operator.support.scenarios import (
    SETTINGS,
    Scenario,
    a_cluster_job,
    cluster_of,
    new_scenario,
    replicas,
    training_scenario,
)

# Suspension


def test_suspended_job_commits_before_its_pods_go() -> None:
    scenario = training_scenario()
    scenario.edit(a_cluster_job(suspend=True))
    decision = scenario.decide()
    assert decision.command == "stop"
    assert cluster_of(decision)["suspend"] is False
    assert (scenario.status.phase, scenario.condition("Suspended").status) == ("Suspending", "Unknown")
    scenario.supervisor_reports("Training", "stopped")
    decision = scenario.decide()
    assert cluster_of(decision)["suspend"] is True
    scenario.observe(pods=(), poll=None)
    scenario.has_children(suspended=True)
    scenario.decide()
    assert (scenario.status.phase, scenario.is_true("Suspended")) == ("Suspended", True)
    assert not scenario.is_true("Reconciling")


def test_unreachable_supervisor_does_not_block_a_suspension() -> None:
    scenario = training_scenario()
    scenario.edit(a_cluster_job(suspend=True))
    scenario.polls_fail(since=scenario.now)
    assert cluster_of(scenario.decide(after=5))["suspend"] is False
    assert cluster_of(scenario.decide(after=SETTINGS.unreachable_seconds))["suspend"] is True


def test_resumed_job_continues_with_all_workers() -> None:
    scenario = training_scenario()
    scenario.edit(a_cluster_job(suspend=True))
    scenario.observe(pods=(), poll=None)
    scenario.has_children(suspended=True)
    scenario.decide()
    scenario.edit(a_cluster_job())
    decision = scenario.decide(after=5000)
    assert cluster_of(decision)["suspend"] is False
    assert replicas(decision) == {"workers": 2}
    assert not scenario.is_true("NotProgressing"), "the time of the suspension does not count"


def test_cancelled_suspension_starts_the_supervisor_again() -> None:
    scenario = training_scenario()
    scenario.supervisor_reports("Training", "stopping")
    assert scenario.decide().command == "start"


@pytest.mark.parametrize("state", ["stopping", "stopped"])
def test_job_that_is_resumed_while_its_workers_stop_does_not_train_yet(state: str) -> None:
    scenario = training_scenario()
    scenario.edit(a_cluster_job(suspend=True))
    scenario.decide()
    scenario.supervisor_reports("Training", state, step=20)
    scenario.edit(a_cluster_job())
    assert scenario.decide().command == "start"
    assert (scenario.status.phase, scenario.is_true("Training"), scenario.is_true("Ready")) == (
        "Starting",
        False,
        False,
    )
    assert scenario.condition("Ready").message == "the workers stop, and then start again"
    assert scenario.status.tokens_per_second is None
    scenario.supervisor_reports("Training", "waiting", step=20)  # the response to the command
    scenario.decide()
    assert (scenario.status.phase, scenario.is_true("Training"), scenario.is_true("Ready")) == (
        "Starting",
        False,
        False,
    )
    scenario.supervisor_reports("Training", step=21)
    scenario.decide()
    assert (scenario.status.phase, scenario.is_true("Training")) == ("Training", True)
    assert scenario.is_true("Ready")


def test_job_that_trains_on_while_its_supervisor_is_told_to_end_still_trains() -> None:
    scenario = training_scenario()
    scenario.supervisor_reports("Training", "stopping", step=20)
    scenario.decide()
    assert scenario.is_true("Training")


def test_job_created_suspended_has_no_pods() -> None:
    decision = Scenario(a_cluster_job(suspend=True)).decide()
    assert cluster_of(decision)["suspend"] is True


def test_suspended_job_in_a_queue_deletes_its_cluster() -> None:
    queue = {"provider": "none", "queueName": "team"}
    scenario = training_scenario(cluster=queue)
    scenario.edit(a_cluster_job(cluster=queue, suspend=True))
    assert scenario.decide().command == "stop"
    scenario.supervisor_reports("Training", "stopped")
    decision = scenario.decide()
    assert [child.kind for child in decision.delete] == ["RayCluster"]
    scenario.observe(children={}, pods=(), poll=None)
    assert "RayCluster" not in {manifest["kind"] for manifest in scenario.decide().apply}
    assert scenario.is_true("Suspended")
    scenario.edit(a_cluster_job(cluster=queue))
    assert replicas(scenario.decide()) == {"workers": 2}


def test_job_suspended_by_kueue_is_not_stopped() -> None:
    scenario = training_scenario(cluster={"provider": "none", "queueName": "team"})
    scenario.has_children(suspended=True)
    decision = scenario.decide()
    assert (decision.command, decision.delete) == ("", [])


# Changes of a running job


def test_more_workers_change_nothing_but_replicas() -> None:
    scenario = training_scenario()
    before = cluster_of(scenario.decide())
    scenario.edit(a_cluster_job(workers={"count": 3, "min": 1}))
    after = cluster_of(scenario.decide())
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
def test_change_of_a_field_without_pods_restarts_no_pod(sections: dict[str, object]) -> None:
    scenario = training_scenario()
    before = cluster_of(scenario.decide())
    scenario.edit(a_cluster_job(**sections))
    decision = scenario.decide()
    assert cluster_of(decision) == before
    assert decision.command == ""
    assert scenario.status.phase == "Training"


def test_new_image_commits_then_replaces_all_pods() -> None:
    scenario = training_scenario()
    scenario.edit(a_cluster_job(cluster={"provider": "none", "image": "mine:2"}))
    decision = scenario.decide()
    assert decision.command == "stop"
    assert scenario.status.phase == "Restarting"
    scenario.supervisor_reports("Training", "stopped")
    assert cluster_of(scenario.decide())["suspend"] is True
    scenario.has_children(suspended=True)
    scenario.has_pods(workers=0)
    scenario.observe(pods=tuple(replace(pod, deleting_since=scenario.now) for pod in scenario.observed.pods), poll=None)
    assert cluster_of(scenario.decide())["suspend"] is True, "not before the last pod is deleted"
    scenario.observe(pods=())
    decision = scenario.decide()
    assert cluster_of(decision)["suspend"] is False
    head = cluster_of(decision)["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["image"] == "mine:2"


def test_wrong_image_stalls_and_a_corrected_one_replaces_the_pods_at_once() -> None:
    scenario = new_scenario(cluster={"provider": "none", "image": "wrong:1"})
    scenario.has_children()
    scenario.has_pods(head=True)
    problem = PodProblem("ErrImagePull", "container ray-head: image wrong:1 cannot be pulled: not found")
    scenario.observe(
        pods=tuple(replace(pod, phase="Pending", ready=False, problem=problem) for pod in scenario.observed.pods)
    )
    scenario.decide()
    stalled = scenario.condition("Stalled")
    assert (scenario.status.phase, stalled.status, stalled.reason) == ("Stalled", "True", "ErrImagePull")
    assert stalled.message == problem.message
    scenario.edit(a_cluster_job(cluster={"provider": "none", "image": "right:1"}))
    decision = scenario.decide()
    assert decision.command == ""
    assert cluster_of(decision)["suspend"] is True
    scenario.observe(pods=())
    scenario.decide()
    assert not scenario.is_true("Stalled")


def test_other_defaults_of_the_operator_change_no_running_job() -> None:
    scenario = training_scenario()
    before = cluster_of(scenario.decide())
    scenario.settings = Settings(image="spotune/trainer:2", ray_version="9.9.9")
    decision = scenario.decide()
    assert cluster_of(decision) == before
    assert scenario.status.phase == "Training"


def test_pinned_image_survives_a_change_of_the_spec() -> None:
    scenario = training_scenario()
    scenario.settings = Settings(image="spotune/trainer:2")
    scenario.edit(a_cluster_job(head={"resources": {"requests": {"cpu": "2"}}}))
    decision = scenario.decide()
    assert cluster_of(decision)["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] == "spotune/trainer:1"


def test_pin_is_what_was_rendered() -> None:
    scenario = training_scenario()
    assert scenario.status.pinned is not None
    pinned = json.loads(scenario.status.pinned.ray_cluster)
    assert pinned["headGroupSpec"] == cluster_of(scenario.decide())["headGroupSpec"]


def test_an_operator_that_is_being_replaced_does_not_take_back_what_its_successor_wrote() -> None:
    scenario = training_scenario()
    scenario.trains(step=42, generation=3, loss=0.5, restarts={"workerLost": 2})
    scenario.decide()
    scenario.trains(step=41, generation=3, loss=0.6, restarts={"workerLost": 2})
    scenario.observe(changed_elsewhere_at=scenario.now + 1)
    decision = scenario.decide(after=1)
    assert decision.requeue_after is not None
    assert decision.requeue_after < SETTINGS.poll_seconds + 1
    assert (scenario.status.step, scenario.status.loss) == (42, 0.5), "the poll is older than what somebody else wrote"
    scenario.trains(step=41, generation=3, loss=0.6, restarts={"workerLost": 2})
    scenario.decide()
    assert (scenario.status.step, scenario.status.loss) == (41, 0.6), "what somebody else wrote was wrong"
    scenario.trains(step=30, generation=4, loss=0.7, restarts={"workerLost": 3})
    scenario.decide()
    assert (scenario.status.generation, scenario.status.step, scenario.status.loss) == (4, 30, 0.7)
    assert (scenario.status.highest_step, scenario.status.restarts.total) == (42, 3)
