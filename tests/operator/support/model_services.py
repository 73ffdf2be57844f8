"""ModelServices and their pods as the API server returns them, for the tests of the CLI."""

from typing import Any

from tests.operator.support.objects import NOW, ago, condition
from tests.operator.support.resolved_services import a_service

__all__ = ["CLUSTER", "NOW", "SERVICE_UID", "ago", "condition", "model_service", "service_pod", "serving"]

SERVICE_UID = "5f0e9a57-4a0c-4f0e-9a57-1d6f5c1f4d22"
CLUSTER = "spotunems-answers-x7k2p"
"""The RayCluster of the service ``answers``."""


def model_service(*conditions: dict[str, Any], name: str = "answers", **status: Any) -> dict[str, Any]:
    """A ModelService created an hour ago, with parts of its status."""
    manifest = a_service(name).model_dump(mode="json", by_alias=True, exclude_unset=True)
    metadata = {"name": name, "namespace": "team", "uid": SERVICE_UID, "generation": 2, "creationTimestamp": ago(3600)}
    given = {"observedGeneration": 2, "conditions": list(conditions), **status}
    return {**manifest, "metadata": metadata, "status": given}


def serving(*conditions: dict[str, Any], **status: Any) -> dict[str, Any]:
    """A service with two ready replicas."""
    found = {
        "phase": "Serving",
        "model": {"location": "pvc://spotune-job/export", "version": "job-01234567-step-9"},
        "replicas": "2/2",
        "url": "http://spotunems-answers.team.svc",
    }
    return model_service(*conditions, **{**found, **status})


def service_pod(
    component: str = "replicas", group: str = "spot", suffix: str = "aaaaa", **status: Any
) -> dict[str, Any]:
    """A ready pod on node n1, with parts of its status replaced."""
    container = "ray-head" if component == "head" else "ray-worker"
    name = f"{CLUSTER}-head-{suffix}" if component == "head" else f"{CLUSTER}-{group}-worker-{suffix}"
    labels = {
        "spotune.dev/service": "answers",
        "app.kubernetes.io/component": component,
        "ray.io/group": "headgroup" if component == "head" else group,
        "ray.io/cluster": CLUSTER,
    }
    running = [{"name": container, "restartCount": 0, "state": {"running": {"startedAt": ago(30)}}}]
    ready = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", "labels": labels},
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running", "containerStatuses": running, "conditions": ready, **status},
    }
