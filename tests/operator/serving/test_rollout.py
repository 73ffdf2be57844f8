"""Rollouts of a new version beside the served one, as repeated decisions of the operator see them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotune.service import ReplicasSpec
from spotune_operator.children.serving.groups import replicas_at
from spotune_operator.serving.gateway_stats import Traffic
from spotune_operator.serving.state import ApplicationState
from tests.operator.serving.rollouts import NEW, OLD, STEPS, application, comparing, counted, rolling, served
from tests.operator.serving.scenario import OUTPUT


def test_a_new_version_starts_beside_the_served_one_and_gets_no_request_before_it_runs() -> None:
    scenario = served()
    scenario.job(OUTPUT, 240, "Complete")
    before = scenario.observed.ray_service
    assert scenario.weights() == {OLD: 100, NEW: 0}
    scenario.ray_service("DEPLOYING")
    assert before is not None
    assert scenario.observed.ray_service is not None
    assert scenario.observed.ray_service.cluster_digest == before.cluster_digest, "KubeRay starts no second cluster"
    scenario.pods(head=1, gateway=1, replicas=2)
    scenario.traffic()
    assert scenario.weights() == {OLD: 100, NEW: 0}
    assert "is DEPLOYING" in scenario.condition("RolledOut").message
    assert scenario.status.phase == "Upgrading"
    assert scenario.condition("Ready").status == "True"


@pytest.mark.parametrize("missing", ["pods", "replicas", "gateway", "kuberay"])
def test_a_version_waits_for_its_pods_its_replicas_the_gateway_and_kuberay(missing: str) -> None:
    scenario = served(STEPS)
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    scenario.ray_service()
    child = scenario.observed.ray_service
    assert child is not None
    assert child.ray is not None
    assert scenario.status.pending_model is not None
    scenario.pods(head=1, gateway=1, replicas=1 if missing == "pods" else 2)
    scenario.traffic()
    ray = child.ray
    if missing == "replicas":
        short = {scenario.status.pending_model.application: ApplicationState("RUNNING", is_complete=False)}
        ray = replace(ray, applications={**ray.applications, **short})
    if missing == "kuberay":
        ray = replace(ray, is_current=False)
    if missing == "gateway":
        scenario.observe(traffic=replace(scenario.observed.traffic, gateways=[]))
        scenario.observe(traffic=replace(scenario.observed.traffic, error="the gateway does not answer"))
    scenario.observe(children={("RayService", child.name): replace(child, ray=ray)})
    assert scenario.weights() == {OLD: 100, NEW: 0}
    assert scenario.status.rollout is not None
    assert scenario.status.rollout.reason


def test_by_default_all_requests_go_to_the_new_version_once_it_runs() -> None:
    scenario = rolling({"steps": [100]})
    assert scenario.weights() == {NEW: 100}
    assert scenario.status.model is not None
    assert scenario.status.model.version == NEW
    assert (scenario.status.pending_model, scenario.status.rollout) == (None, None)
    assert scenario.condition("RolledOut").reason == "Promoted"
    assert scenario.condition("RolledOut").status == "True"


def test_a_switch_at_once_needs_no_statistics() -> None:
    scenario = served({"steps": [100]})
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=2)
    scenario.observe(traffic=Traffic(no_replica_report=True))
    assert scenario.weights() == {OLD: 100, NEW: 0}
    scenario.now += 61
    assert scenario.weights() == {NEW: 100}


def test_a_step_waits_until_the_replicas_have_loaded_the_version() -> None:
    scenario = served(STEPS)
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=2, loading=1)
    scenario.traffic()
    assert scenario.weights() == {OLD: 100, NEW: 0}
    assert "1 of 2 replicas are ready" in scenario.condition("RolledOut").message
    scenario.pods(head=1, gateway=1, replicas=2)
    assert scenario.weights() == {OLD: 80, NEW: 20}


def test_the_former_version_keeps_its_replicas_until_its_requests_have_ended() -> None:
    scenario = rolling({"steps": [100]}, replicas={"min": 3, "max": 3})
    former = scenario.status.model
    assert former is not None
    scenario.decide()
    assert [each.version for each in scenario.status.retiring] == [OLD]
    assert application(scenario, former)["deployments"] == [{"name": "Replica", "num_replicas": 3}]
    scenario.ray_service()
    scenario.traffic(step_120=counted(9, running=1))
    assert former.application in scenario.applications()
    scenario.traffic(step_120=counted(10, weight=100))
    assert former.application in scenario.applications(), "a gateway still gives it new requests"
    scenario.traffic(step_120=counted(10))
    assert former.application not in scenario.applications()
    assert scenario.status.retiring == []
    assert scenario.condition("RolledOut").reason == "Promoted"


def test_the_former_version_is_removed_after_the_longest_request_at_the_latest() -> None:
    scenario = rolling({"steps": [100]}, requestTimeout="90s")
    scenario.decide()
    scenario.ray_service()
    scenario.traffic(step_120=counted(9, running=1), seconds=80)
    assert len(scenario.applications()) == 3
    scenario.now += 15
    assert len(scenario.applications()) == 2


def test_steps_advance_after_the_pause_with_enough_requests() -> None:
    scenario = comparing()
    scenario.traffic(step_240=counted(30), step_120=counted(120), seconds=50)
    assert scenario.weights() == {OLD: 80, NEW: 20}
    scenario.traffic(step_240=counted(19), step_120=counted(120), seconds=15)
    assert scenario.weights() == {OLD: 80, NEW: 20}
    assert "19 of 20 requests" in scenario.condition("RolledOut").message
    scenario.traffic(step_240=counted(30), step_120=counted(120))
    assert scenario.weights() == {OLD: 80, NEW: 20}, "its replicas for all requests are not started yet"
    scenario.ray_service()
    scenario.traffic(step_240=counted(40, weight=20), step_120=counted(150, weight=80))
    assert scenario.weights() == {NEW: 100}
    assert scenario.condition("RolledOut").message == (
        f"{NEW} gets all requests; error rate 0.0 % against 0.0 % over 40 requests, "
        "median time to the first token 15 ms against 15 ms"
    )


def test_a_candidate_has_replicas_for_its_share_and_all_of_them_before_it_gets_all_requests() -> None:
    scenario = rolling(replicas={"min": 4, "max": 4})
    scenario.decide()
    candidate = scenario.status.pending_model
    assert candidate is not None
    assert application(scenario, candidate)["deployments"][0]["num_replicas"] == 1
    scenario.traffic(step_240=counted(30), step_120=counted(120), seconds=65)
    assert application(scenario, candidate)["deployments"][0]["num_replicas"] == 4
    assert scenario.weights() == {OLD: 80, NEW: 20}


@pytest.mark.parametrize(("percent", "least", "most"), [(10, 1, 1), (50, 2, 5), (100, 3, 10)])
def test_replicas_of_a_share(percent: int, least: int, most: int) -> None:
    found = replicas_at(ReplicasSpec(min=3, max=10), percent)
    assert (found.min, found.max) == (least, most)
    assert replicas_at(ReplicasSpec(min=0, max=1), percent).min == 0


def test_without_requests_a_step_ends_after_three_pauses() -> None:
    scenario = comparing()
    scenario.traffic(seconds=175)
    assert scenario.weights() == {OLD: 80, NEW: 20}
    assert scenario.status.rollout is not None
    assert scenario.status.rollout.step == 20
    scenario.traffic(seconds=10)
    scenario.decide()
    scenario.ray_service()
    scenario.traffic()
    assert scenario.weights() == {NEW: 100}
    assert "it was not compared: it had no requests" in scenario.condition("RolledOut").message


def test_without_statistics_a_step_does_not_end() -> None:
    scenario = comparing()
    scenario.observe(traffic=replace(scenario.observed.traffic, error="the gateway does not answer"))
    scenario.now += 1000
    assert scenario.weights() == {OLD: 80, NEW: 20}
    assert "it cannot be compared: the gateway does not answer" in scenario.condition("RolledOut").message
