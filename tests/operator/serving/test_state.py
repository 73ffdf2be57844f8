"""What is kept of KubeRay's objects: statuses as KubeRay 1.6 writes them."""

from __future__ import annotations

from typing import Any

import pytest

from spotune.units.timestamps import unix_time
from spotune_operator.serving.scaling import WorkerGroup, ray_cluster_view
from spotune_operator.serving.state import (
    ApplicationState,
    RayServiceState,
    ServiceChild,
    service_child_view,
    service_pod_view,
)

LABELS = {"spotune.dev/service": "answers"}
RUNNING = {
    "spotune": {
        "status": "RUNNING",
        "serveDeploymentStatuses": {"Replica": {"status": "HEALTHY"}, "Gateway": {"status": "HEALTHY"}},
    }
}


def state(generation: int = 1, **status: Any) -> RayServiceState:
    metadata = {
        "name": "spotunems-answers",
        "namespace": "team",
        "uid": "u",
        "labels": LABELS,
        "generation": generation,
    }
    view = service_child_view({"metadata": metadata, "spec": {}, "status": status}, "RayService")
    assert view.ray is not None
    return view.ray


def test_first_cluster_is_pending() -> None:
    found = state(observedGeneration=1, pendingServiceStatus={"rayClusterName": "a"}, activeServiceStatus={})
    assert (found.active_cluster, found.pending_cluster, found.is_upgrading) == ("", "a", False)
    assert found.applications == {}


def test_active_cluster_has_the_application() -> None:
    active = {"rayClusterName": "a", "applicationStatuses": RUNNING}
    found = state(observedGeneration=1, activeServiceStatus=active, pendingServiceStatus={})
    assert found.applications == {"spotune": ApplicationState("RUNNING", is_complete=True)}
    assert (found.active_cluster, found.is_current) == ("a", True)


def test_upgrade_has_the_application_of_the_pending_cluster() -> None:
    deploying = {"spotune": {"status": "DEPLOYING", "message": "starting"}}
    pending = {"rayClusterName": "b", "applicationStatuses": deploying}
    found = state(activeServiceStatus={"rayClusterName": "a"}, pendingServiceStatus=pending)
    assert found.is_upgrading
    assert found.applications["spotune"] == ApplicationState("DEPLOYING", "starting", is_complete=True)


def test_message_is_that_of_the_unhealthy_deployment() -> None:
    deployments = {
        "Gateway": {"status": "HEALTHY"},
        "Replica": {"status": "DEPLOY_FAILED", "message": "no config.json"},
    }
    failed = {"spotune": {"status": "DEPLOY_FAILED", "message": "failed", "serveDeploymentStatuses": deployments}}
    found = state(pendingServiceStatus={"rayClusterName": "a", "applicationStatuses": failed})
    assert found.applications["spotune"] == ApplicationState("DEPLOY_FAILED", "no config.json")


def test_spec_that_kuberay_has_not_processed_is_not_current() -> None:
    assert not state(generation=2, observedGeneration=1).is_current


def test_refused_spec_has_the_message_of_kuberay() -> None:
    conditions = [{"type": "Ready", "status": "False", "reason": "ValidationFailed", "message": "no head"}]
    assert state(conditions=conditions).invalid == "no head"


def http_route(**condition: Any) -> ServiceChild:
    accepted = {"type": "Accepted", "status": "False", "reason": "UnsupportedValue", "message": "no timeouts"}
    current = {"observedGeneration": 3}
    conditions = [{"type": "ResolvedRefs", "status": "True"} | current, accepted | current | condition]
    metadata = {"name": "spotunems-answers", "namespace": "team", "uid": "u", "generation": 3}
    parents = [{"parentRef": {"name": "public"}, "conditions": conditions}]
    return service_child_view({"metadata": metadata, "spec": {}, "status": {"parents": parents}}, "HTTPRoute")


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("UnsupportedValue", "; if its controller has no timeouts, set spec.httpRoute.disableTimeout to false"),
        ("NotAllowedByListeners", "; allow routes of this namespace in its listener (allowedRoutes)"),
        ("Pending", ""),
    ],
)
def test_gateway_that_does_not_accept_the_route_is_named_with_its_message_and_the_remedy(
    reason: str, remedy: str
) -> None:
    found = http_route(reason=reason).not_accepted
    assert found == f"the Gateway public does not accept the HTTPRoute: {reason}: no timeouts{remedy}"


@pytest.mark.parametrize("condition", [{"status": "True"}, {"observedGeneration": 2}], ids=["accepted", "outdated"])
def test_accepted_or_outdated_condition_of_a_route_is_no_problem(condition: dict[str, Any]) -> None:
    assert http_route(**condition).not_accepted == ""


def test_pod_belongs_to_a_component_and_a_cluster() -> None:
    labels = {**LABELS, "app.kubernetes.io/component": "gateway", "ray.io/cluster": "a"}
    metadata = {"name": "pod", "namespace": "team", "uid": "p", "labels": labels}
    ready = {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    pod = service_pod_view({"metadata": metadata, "status": ready})
    assert (pod.service, pod.component, pod.cluster, pod.ready) == ("answers", "gateway", "a", True)
    assert pod.ready_since == "2026-01-01T00:00:00Z"
    deletion = {"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30}
    deleted = service_pod_view({"metadata": metadata | deletion, "spec": {"nodeName": "n1"}, "status": ready})
    assert not deleted.ready
    assert deleted.node == "n1"
    assert deleted.deleting_since == unix_time("2026-01-01T00:00:00Z")


def test_cluster_has_its_groups_and_why_pods_cannot_be_created() -> None:
    owner = {"kind": "RayService", "name": "spotunems-answers", "uid": "r", "controller": True}
    metadata = {"name": "a", "namespace": "team", "uid": "u", "labels": LABELS, "ownerReferences": [owner]}
    spec = {"workerGroupSpecs": [{"groupName": "spot", "replicas": 2, "minReplicas": 1, "maxReplicas": 3}]}
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreateWorkerPod", "message": "quota"}
    view = ray_cluster_view({"metadata": metadata, "spec": spec, "status": {"conditions": [failure]}})
    assert view.groups == [WorkerGroup("spot", replicas=2, min=1, max=3)]
    assert (view.uid, view.owner) == ("u", "r")
    assert view.problem is not None
    assert view.problem.reason == "FailedCreateWorkerPod"
