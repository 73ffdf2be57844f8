"""The Ray cluster of a service that was corrected before it served anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotune.custom_resource.pod_problems import PodProblem
from spotune_operator.serving.scaling import RayClusterView
from spotune_operator.serving.state import ServicePod
from tests.operator.serving.scenario import ACTIVE, OUTPUT, PENDING, Scenario

OLD, NEW = ACTIVE, PENDING


def cluster(name: str, created: str, **changes: Any) -> RayClusterView:
    return RayClusterView(
        "team", name, "answers", **{"uid": f"uid-{name}", "owner": "uid-r", "created": created} | changes
    )


FIRST, SECOND = cluster(OLD, "2027-01-15T08:00:00Z"), cluster(NEW, "2027-01-15T08:10:00Z")


def pod(component: str, name: str, problem: PodProblem | None = None) -> ServicePod:
    return ServicePod(f"{name}-{component}", "team", "answers", component, name, problem=problem, ready=not problem)


def unschedulable(message: str) -> PodProblem:
    return PodProblem("Unschedulable", message)


@pytest.fixture
def corrected() -> Scenario:
    """KubeRay has given up the first cluster, and created the second one for the corrected spec."""
    scenario = Scenario()
    scenario.job(OUTPUT, 120, "Complete")
    scenario.edit(gpus=1)
    scenario.ray_service("", active="", pending_cluster=OLD)
    scenario.observe(clusters=[FIRST], pods=[pod("head", OLD)])
    assert scenario.decide().give_up == []
    scenario.edit(gpus=0)
    scenario.ray_service("", active="", pending_cluster=NEW)
    scenario.observe(clusters=[FIRST, SECOND], pods=[pod("head", OLD)])
    return scenario


def test_the_first_cluster_is_deleted_if_nothing_was_served(corrected: Scenario) -> None:
    assert corrected.decide().give_up == [FIRST]


def test_a_cluster_that_is_being_deleted_is_not_deleted_again(corrected: Scenario) -> None:
    corrected.observe(clusters=[cluster(OLD, FIRST.created, deleting=True), SECOND])
    assert corrected.decide().give_up == []


@pytest.mark.parametrize("active", [OLD, "spotunems-answers-other"])
def test_no_cluster_is_deleted_once_one_gets_requests(corrected: Scenario, active: str) -> None:
    corrected.ray_service(active=active, pending_cluster=NEW)
    assert corrected.decide().give_up == []


def test_the_cluster_that_becomes_the_serving_one_is_kept(corrected: Scenario) -> None:
    corrected.ray_service(active=NEW)
    assert corrected.decide().give_up == []


def test_no_cluster_is_deleted_before_the_newest_spec_is_applied(corrected: Scenario) -> None:
    corrected.edit(gpus=0, capacity="on-demand")
    assert corrected.decide().give_up == []


def test_no_cluster_is_deleted_before_kuberay_has_processed_the_newest_spec(corrected: Scenario) -> None:
    child = corrected.observed.ray_service
    assert child is not None
    stale = replace(child, ray=replace(corrected.observed.ray, is_current=False))
    corrected.observe(children={("RayService", child.name): stale})
    assert corrected.decide().give_up == []


def test_nothing_is_deleted_before_its_successor_exists(corrected: Scenario) -> None:
    corrected.observe(clusters=[FIRST])
    assert corrected.decide().give_up == []


def test_a_cluster_that_is_newer_than_the_pending_one_is_kept(corrected: Scenario) -> None:
    """The cache of RayServices may be older than that of RayClusters."""
    newest = cluster("spotunems-answers-ccccc", "2027-01-15T08:20:00Z")
    corrected.observe(clusters=[FIRST, SECOND, newest])
    assert corrected.decide().give_up == [FIRST]


def test_a_cluster_of_somebody_else_is_kept(corrected: Scenario) -> None:
    corrected.observe(clusters=[cluster(OLD, FIRST.created, owner="uid-other"), SECOND])
    assert corrected.decide().give_up == []


def test_the_status_says_that_the_old_cluster_makes_room(corrected: Scenario) -> None:
    corrected.observe(pods=[pod("head", OLD), pod("head", NEW, unschedulable("1 Insufficient cpu"))])
    corrected.decide()
    found = corrected.condition("ReplicasReady")
    assert (found.status, found.reason) == ("False", "ReplacingCluster")
    assert found.message.endswith("so the new one replaces the old one (pods left of it: 1)")
    assert corrected.status.phase == "Deploying"
    corrected.observe(clusters=[SECOND], pods=[pod("head", NEW, unschedulable("1 Insufficient cpu"))])
    corrected.decide()
    assert corrected.condition("ReplicasReady").message == "1 Insufficient cpu"


def test_a_problem_of_the_new_cluster_that_needs_a_user_is_shown_at_once(corrected: Scenario) -> None:
    old = pod("gateway", OLD, PodProblem("ErrImagePull", "of the former spec"))
    corrected.observe(pods=[old, pod("head", NEW, PodProblem("ErrImagePull", "not found"))])
    corrected.decide()
    assert corrected.condition("Stalled").message == "not found"


def test_problems_of_the_old_cluster_are_not_shown(corrected: Scenario) -> None:
    failed = cluster(OLD, FIRST.created, problem=PodProblem("FailedCreateWorkerPod", "of the former spec"))
    gateway = pod("gateway", OLD, PodProblem("ErrImagePull", "of the former spec"))
    corrected.observe(clusters=[failed, SECOND], pods=[gateway])
    corrected.decide()
    assert corrected.condition("Stalled").status == "False"


def test_all_components_that_fit_no_node_are_named_with_a_missing_gpu_first() -> None:
    scenario = Scenario()
    scenario.job(OUTPUT, 120, "Complete")
    scenario.ray_service("", active="", pending_cluster=ACTIVE)
    gateway = unschedulable("the pod asks for 1 CPU; 0/3 nodes are available: 3 Insufficient cpu.")
    replica = unschedulable("the pod asks for 1 GPU; 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    scenario.observe(pods=[pod("gateway", ACTIVE, gateway), pod("replicas", ACTIVE, replica), pod("head", ACTIVE)])
    scenario.decide()
    assert scenario.condition("ReplicasReady").message == (
        "replicas: the pod asks for 1 GPU; 0/3 nodes are available: 3 Insufficient nvidia.com/gpu; "
        "gateway: the pod asks for 1 CPU; 0/3 nodes are available: 3 Insufficient cpu"
    )
    scenario.observe(pods=[pod("gateway", ACTIVE, gateway), pod("head", ACTIVE)])
    scenario.decide()
    assert scenario.condition("ReplicasReady").message == gateway.message
