"""Nodes as decisions look at them, what is stuck on those that are gone, and what is to leave those that will be.

A pod that is Terminating on a dead node stays so for ever, and KubeRay makes no other in its place: it is deleted by
force (Kubernetes, "Force Delete StatefulSet Pods", has why that is a person's decision elsewhere; here a worker that
should still run can change nothing, for its generation is fenced).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from spotune_operator.kube.timestamps import unix_time
from spotune_operator.providers import GPU_RESOURCE

PREFIX: Final = "spotune.dev/"
"""Of the annotations that are ours."""
_VM_EVENTS: Final = frozenset({"VMEventScheduled", "PreemptionScheduled"})
"""Conditions in which the node problem detector of AKS passes Azure's Scheduled Events on; the message says which."""
_RECLAIM: Final = ("Preempt Scheduled", "Preempt Started")
"""How such a message begins when a spot machine is taken away. Others tell of a freeze, a reboot or mere advice."""
_MARGIN_SECONDS: Final = 5.0
"""After a pod's grace, for a kubelet that is slow but alive to say that the pod is gone."""


@dataclass(frozen=True)
class NodeView:
    """A node, as far as decisions look at it.

    Attributes:
        name: Of the node.
        provider_id: ``spec.providerID``; empty if it has none.
        ready: Whether its condition ``Ready`` holds.
        not_ready_since: Unix time since which it does not; None while it does.
        reclaimed: Whether its cloud has announced to take the machine away.
        unschedulable: Whether it is cordoned.
        gpu_capacity: GPUs that its device plugin has found.
        gpu_allocatable: Those of them that are healthy.
        labels: Of the node.
        created: Unix time.
        annotations: Those of ours.
        uid: Of the node.
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


def node_view(raw: Mapping[str, Any]) -> NodeView:
    """A ``v1.Node``. One whose kubelet has never said anything is not ready since it was made."""
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
        reclaimed=any(_announces_the_end(conditions.get(name)) for name in _VM_EVENTS),
        unschedulable=bool(spec.get("unschedulable")),
        gpu_capacity=int((status.get("capacity") or {}).get(GPU_RESOURCE, 0)),
        gpu_allocatable=int((status.get("allocatable") or {}).get(GPU_RESOURCE, 0)),
        labels=metadata.get("labels") or {},
        created=created,
        annotations={name: value for name, value in annotations if name.startswith(PREFIX)},
        uid=metadata["uid"],
    )


def _announces_the_end(condition: Mapping[str, Any] | None) -> bool:
    if condition is None or condition.get("status") != "True":
        return False
    return str(condition.get("message", "")).startswith(_RECLAIM)


class PodOnNode(Protocol):
    """What has to be known of a pod to tell whether it is stuck, or should leave."""

    @property
    def node(self) -> str:
        """Where it runs; empty before it is scheduled."""

    @property
    def deleting_since(self) -> float | None:
        """Unix time at which it was asked to go; None if it was not."""

    @property
    def grace_seconds(self) -> float:
        """What it then has."""


P = TypeVar("P", bound=PodOnNode)


def stuck_pods(pods: Iterable[P], nodes: Mapping[str, NodeView], now: float) -> list[P]:
    """Pods that should be gone, on nodes where nobody ends them: to be deleted with a grace of 0.

    Args:
        pods: Of a job.
        nodes: All nodes by name; a node that is not among them counts as gone, so they must be known already.
        now: Unix time.
    """
    return [pod for pod in pods if _is_overdue(pod, now) and not (pod.node in nodes and nodes[pod.node].ready)]


def leaving_pods(pods: Iterable[P], nodes: Mapping[str, NodeView]) -> list[P]:
    """Pods to be asked to go, with their own grace, because the machine that they run on is about to.

    Args:
        pods: Of a job.
        nodes: By name.
    """
    doomed = {name for name, node in nodes.items() if node.reclaimed}
    return [pod for pod in pods if pod.node in doomed and pod.deleting_since is None]


def _is_overdue(pod: PodOnNode, now: float) -> bool:
    if pod.deleting_since is None or not pod.node:
        return False
    return now >= pod.deleting_since + pod.grace_seconds + _MARGIN_SECONDS
