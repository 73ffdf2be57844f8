"""The observed nodes, and two rules for pods: which are stuck on a dead node, and which must leave a reclaimed one.

A pod that is Terminating on a dead node stays so forever, and KubeRay does not replace it, so it is deleted by force.
Kubernetes ("Force Delete StatefulSet Pods") leaves that decision to people, because the pod may still run. Here a
worker that still runs does no harm: its writes are fenced off by its generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from spotune.units.timestamps import unix_time
from spotune_operator.providers import GPU_RESOURCE

PREFIX: Final = "spotune.dev/"
"""Prefix of the operator's annotations."""
_VM_EVENTS: Final = frozenset({"VMEventScheduled", "PreemptionScheduled"})
"""Conditions that the node problem detector of AKS sets for Azure's Scheduled Events; the message has the event."""
_RECLAIM_MESSAGES: Final = ("Preempt Scheduled", "Preempt Started")
"""Beginnings of that message when a spot machine is reclaimed; other events are a freeze, a reboot or advice."""
_MARGIN_SECONDS: Final = 5.0
"""Added to a pod's grace period, so that a slow kubelet can confirm the end of the pod."""
_MOST_GRACE_SECONDS: Final = 5.0
"""A longer grace period is not waited for: a kubelet that is lost does not tell its containers that they have one."""


@dataclass(frozen=True)
class NodeView:
    """The fields of a node that decisions need.

    Attributes:
        name: Its name.
        provider_id: ``spec.providerID``; empty if it has none.
        ready: Whether its condition ``Ready`` is true.
        not_ready_since: Unix time since which it is not ready; None while it is.
        reclaimed: Whether the cloud has announced that it reclaims the machine.
        unschedulable: Whether it is cordoned.
        gpu_capacity: Number of GPUs that its device plugin found.
        gpu_allocatable: Number of healthy GPUs among them.
        labels: Its labels.
        created: Unix time.
        annotations: The operator's annotations on it.
        uid: Its uid.
        boot: Its boot ID; empty before its kubelet has reported it.
    """

    name: str
    provider_id: str = ""
    ready: bool = True
    not_ready_since: float | None = None
    reclaimed: bool = False
    unschedulable: bool = False
    gpu_capacity: int = 0
    gpu_allocatable: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    created: float = 0.0
    annotations: Mapping[str, str] = field(default_factory=dict)
    uid: str = ""
    boot: str = ""


def node_view(raw: Mapping[str, Any]) -> NodeView:
    """The view of a ``v1.Node``. Without a report of its kubelet it is not ready since its creation."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    created = unix_time(metadata["creationTimestamp"]) or 0.0
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    condition = conditions.get("Ready") or {}
    ready = condition.get("status") == "True"
    annotations = (metadata.get("annotations") or {}).items()
    return NodeView(
        name=metadata["name"],
        provider_id=spec.get("providerID", ""),
        ready=ready,
        not_ready_since=None if ready else unix_time(condition.get("lastTransitionTime")) or created,
        reclaimed=any(_announces_reclaim(conditions.get(name)) for name in _VM_EVENTS),
        unschedulable=bool(spec.get("unschedulable")),
        gpu_capacity=int((status.get("capacity") or {}).get(GPU_RESOURCE, 0)),
        gpu_allocatable=int((status.get("allocatable") or {}).get(GPU_RESOURCE, 0)),
        labels=metadata.get("labels") or {},
        created=created,
        annotations={name: value for name, value in annotations if name.startswith(PREFIX)},
        uid=metadata["uid"],
        boot=(status.get("nodeInfo") or {}).get("bootID", ""),
    )


def _announces_reclaim(condition: Mapping[str, Any] | None) -> bool:
    if condition is None or condition.get("status") != "True":
        return False
    return str(condition.get("message", "")).startswith(_RECLAIM_MESSAGES)


class PodOnNode(Protocol):
    """The fields of a pod that the two rules need."""

    @property
    def node(self) -> str:
        """Its node; empty before it is scheduled."""

    @property
    def deleting_since(self) -> float | None:
        """Unix time of its deletion request; None without one."""

    @property
    def grace_seconds(self) -> float:
        """Its grace period after that request."""


P = TypeVar("P", bound=PodOnNode)


def stuck_pods(pods: Iterable[P], nodes: Mapping[str, NodeView], now: float) -> list[P]:
    """Pods that are to end on nodes that are gone or not ready, and do not; to be deleted by force.

    Args:
        pods: The pods of a job.
        nodes: All nodes by name. A missing one counts as gone, so the cache of nodes must be filled.
        now: Unix time.
    """
    return [pod for pod in pods if _is_overdue(pod, now) and not (pod.node in nodes and nodes[pod.node].ready)]


def pods_on_reclaimed_nodes(pods: Iterable[P], nodes: Mapping[str, NodeView]) -> list[P]:
    """Pods on nodes that the cloud reclaims; to be deleted with their own grace period.

    Args:
        pods: The pods of a job.
        nodes: Their nodes, by name.
    """
    reclaimed = {name for name, node in nodes.items() if node.reclaimed}
    return [pod for pod in pods if pod.node in reclaimed and pod.deleting_since is None]


def _is_overdue(pod: PodOnNode, now: float) -> bool:
    if pod.deleting_since is None or not pod.node:
        return False
    return now >= pod.deleting_since + min(pod.grace_seconds, _MOST_GRACE_SECONDS) + _MARGIN_SECONDS
