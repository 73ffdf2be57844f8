"""ModelServices as the API server returns them, and their pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spotune.crd.definition import MODEL_SERVICES
from spotune.custom_resource.object_names import (
    CLUSTER_LABEL,
    COMPONENT_LABEL,
    GATEWAY,
    GROUP_LABEL,
    HEAD_COMPONENT,
    REPLICAS,
    SERVICE_LABEL,
)
from spotune.custom_resource.pod_problems import pod_problem
from spotune.errors import KubernetesError, NotFoundError, RefusedError
from spotune_client.cluster.client import Cluster, Manifest
from spotune_client.cluster.resources import label_of, list_objects, pods_with
from spotune_client.cluster.volume_pod import Notify

Service = Mapping[str, Any]

COMPONENTS: Final = (GATEWAY, REPLICAS, HEAD_COMPONENT)
"""The kinds of pods of a service, in the order in which they are shown."""
_CAPACITIES: Final = ("spot", "on-demand")
SERVING_GROUPS: Final = (GATEWAY, *_CAPACITIES)
"""The worker groups of a service; the groups of replicas have the names of their capacity types."""


@dataclass(frozen=True)
class PodRow:
    """A pod of a service, for display.

    Attributes:
        name: Its name.
        component: ``gateway``, ``replicas`` or ``head``.
        cluster: Its RayCluster; of two, KubeRay replaces one by the other.
        created: RFC 3339 time of its creation; empty if unknown.
        node: Its node; empty before it is scheduled.
        capacity: ``spot`` or ``on-demand``: the nodes that it is for; empty if unknown.
        state: ``ready``, ``starting``, ``stopping``, or why it does not start.
        is_problem: Whether the state is a problem.
        restarts: Number of restarts of its containers.
    """

    name: str
    component: str
    cluster: str
    created: str
    node: str
    capacity: str
    state: str
    is_problem: bool
    restarts: int


def list_visible_services(cluster: Cluster, notify: Notify, *, everywhere: bool = False) -> list[Manifest]:
    """The services of the namespace, or of all namespaces.

    Empty if ModelServices are not installed, or if the user may not list them, which `notify` says.

    Raises:
        KubernetesError: The API server does not answer.
    """
    try:
        return list_objects(cluster, MODEL_SERVICES, everywhere=everywhere)
    except KubernetesError as error:
        if isinstance(error, RefusedError):
            notify(f"without ModelServices: {error}")
        elif not isinstance(error.__cause__, NotFoundError):
            raise
        return []


def service_pods(cluster: Cluster, name: str, component: str = "") -> list[Manifest]:
    """The pods of a service, including terminating ones; of one component, or of all if it is empty."""
    return pods_with(cluster, SERVICE_LABEL, name, component)


def component_of(pod: Mapping[str, Any]) -> str:
    """The component of a pod."""
    return label_of(pod, COMPONENT_LABEL)


def pod_row(pod: Mapping[str, Any]) -> PodRow:
    """What is shown of a ``v1.Pod``."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    problem = None if metadata.get("deletionTimestamp") else pod_problem(pod)
    component, group = component_of(pod), label_of(pod, GROUP_LABEL)
    return PodRow(
        name=metadata["name"],
        component=component,
        cluster=label_of(pod, CLUSTER_LABEL),
        created=metadata.get("creationTimestamp") or "",
        node=(pod.get("spec") or {}).get("nodeName") or "",
        capacity=_capacity(component, group),
        state=f"{problem.reason}: {problem.message}" if problem is not None else _state(pod),
        is_problem=problem is not None,
        restarts=sum(container.get("restartCount") or 0 for container in status.get("containerStatuses") or ()),
    )


def _capacity(component: str, group: str) -> str:
    """Capacity type of the nodes of a pod, by its worker group; empty if unknown."""
    if component != REPLICAS:
        return "on-demand"
    return group if group in _CAPACITIES else ""


def _state(pod: Mapping[str, Any]) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "stopping"
    conditions = (pod.get("status") or {}).get("conditions") or ()
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return "ready" if is_ready else "starting"
