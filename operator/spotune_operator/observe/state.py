"""What is known of a job's surroundings at the moment of a decision: plain values, made from the API server's objects.

Only what decisions need is kept of an object, so that a thousand jobs fit into little memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spotune_operator.children.resolved_job import JOB_LABEL
from spotune_operator.kube.timestamps import unix_time
from spotune_operator.observe.nodes import NodeView
from spotune_operator.observe.pod_problems import Trouble, explain_pending
from spotune_operator.observe.supervisor_status import Reading
from spotune_operator.providers import GPU_RESOURCE

PREFIX: Final = "spotune.dev/"
"""Of the annotations that are ours."""
TEMPLATE_ANNOTATION: Final = f"{PREFIX}template"
"""Of pods: a hash of the template that they were made from."""
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
GROUP_LABEL: Final = "ray.io/group"

JobKey = tuple[str, str]
"""Namespace and name of a job."""

_OF_THE_SERVER: Final = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink")


@dataclass(frozen=True)
class Pod:
    """A pod of a job.

    Attributes:
        name: Of the pod.
        namespace: Of the pod.
        uid: Of the pod.
        job: Name of the job.
        component: ``head`` or ``workers``.
        group: KubeRay's worker group.
        template: Hash of the template that it was made from; empty if it does not say.
        node: Where it runs; empty before it is scheduled.
        ip: Its address; empty before it has one.
        phase: Of Kubernetes: Pending, Running, Succeeded, Failed.
        ready: Whether its condition ``Ready`` holds.
        created: Unix time.
        started: Unix time of its first container's start, None before.
        deleting_since: Unix time at which it was asked to go, None if it was not.
        grace_seconds: What it then has.
        gpus: GPUs that it holds.
        trouble: Why it does not start, None if nothing is known to be wrong.
    """

    name: str
    namespace: str
    uid: str
    job: str
    component: str
    group: str = ""
    template: str = ""
    node: str = ""
    ip: str = ""
    phase: str = "Pending"
    ready: bool = False
    created: float = 0.0
    started: float | None = None
    deleting_since: float | None = None
    grace_seconds: float = 30.0
    gpus: int = 0
    trouble: Trouble | None = None

    @property
    def runs(self) -> bool:
        """Whether its containers have been started and it is to stay."""
        return self.phase == "Running" and self.deleting_since is None


@dataclass(frozen=True)
class Child:
    """An object that the operator made, as far as decisions look at it.

    Attributes:
        kind: Of the object.
        namespace: Of the object.
        name: Of the object.
        uid: Of the object.
        job: Name of the job it belongs to.
        digest: Of all that a user or we may write: it changes when somebody does.
        deleting: Whether it is on its way out.
        phase: Of a claim: Pending, Bound, Lost.
        storage_class: Of a claim.
        capacity: Of a claim: what its volume has, as a quantity.
        suspended: Of a RayCluster: whether its pods are to go.
        trouble: Of a RayCluster: why its pods cannot be made.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    job: str
    digest: str
    deleting: bool = False
    phase: str = ""
    storage_class: str = ""
    capacity: str = ""
    suspended: bool = False
    trouble: Trouble | None = None


@dataclass(frozen=True)
class Observed:
    """All that a decision is made from, besides the job itself.

    Attributes:
        provider_ids: ``spec.providerID`` of the cluster's nodes.
        storage_classes: StorageClasses by name, as the API server has them; None: not known yet.
        children: By kind.
        pods: Of the job.
        nodes: By name.
        reading: Of the supervisor; None while there is no head to ask.
        refused: By kind: what the API server said to the last try to apply it.
    """

    provider_ids: Sequence[str] = ()
    storage_classes: Mapping[str, Mapping[str, Any]] | None = None
    children: Mapping[str, Child] = field(default_factory=dict)
    pods: Sequence[Pod] = ()
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    reading: Reading | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def head(self) -> Pod | None:
        """The head pod that is to stay, if there is one."""
        return next((pod for pod in self.pods if pod.component == "head" and pod.deleting_since is None), None)

    @property
    def workers(self) -> list[Pod]:
        """The worker pods that are to stay."""
        return [pod for pod in self.pods if pod.component == "workers" and pod.deleting_since is None]


def pod_view(raw: Mapping[str, Any]) -> Pod:
    """A ``v1.Pod``."""
    metadata, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    labels = metadata.get("labels") or {}
    deadline = unix_time(metadata.get("deletionTimestamp"))
    grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions") or ())
    return Pod(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        job=labels.get(JOB_LABEL, ""),
        component=labels.get(COMPONENT_LABEL, ""),
        group=labels.get(GROUP_LABEL, ""),
        template=(metadata.get("annotations") or {}).get(TEMPLATE_ANNOTATION, ""),
        node=spec.get("nodeName", ""),
        ip=status.get("podIP", ""),
        phase=status.get("phase", "Pending"),
        ready=ready,
        created=unix_time(metadata["creationTimestamp"]) or 0.0,
        started=_first_start(status),
        deleting_since=deadline - grace if deadline is not None else None,
        grace_seconds=grace,
        gpus=sum(int(_limits(container).get(GPU_RESOURCE, 0)) for container in spec.get("containers") or ()),
        trouble=explain_pending(raw),
    )


def child_view(raw: Mapping[str, Any], kind: str) -> Child:
    """A child of any kind."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    return Child(
        kind=kind,
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        job=(metadata.get("labels") or {}).get(JOB_LABEL, ""),
        digest=content_digest(raw),
        deleting="deletionTimestamp" in metadata,
        phase=status.get("phase", "") if kind == "PersistentVolumeClaim" else "",
        storage_class=spec.get("storageClassName") or "" if kind == "PersistentVolumeClaim" else "",
        capacity=(status.get("capacity") or {}).get("storage", ""),
        suspended=bool(spec.get("suspend")),
        trouble=explain_pending(raw) if kind == "RayCluster" else None,
    )


def content_digest(raw: Mapping[str, Any]) -> str:
    """A hash of an object without its status and what the API server counts.

    Nor has it the kind: items of a list of Kubernetes' own kinds do not say it, the same objects in a watch do.
    """
    content = {name: value for name, value in raw.items() if name not in ("apiVersion", "kind", "status", "metadata")}
    metadata = {name: value for name, value in raw["metadata"].items() if name not in _OF_THE_SERVER}
    return digest({**content, "metadata": metadata})


def digest(content: Any) -> str:
    """A short hash of JSON, whatever the order of its fields."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _first_start(status: Mapping[str, Any]) -> float | None:
    starts = [
        unix_time(((container.get("state") or {}).get("running") or {}).get("startedAt"))
        for container in status.get("containerStatuses") or ()
    ]
    return min((start for start in starts if start is not None), default=None)


def _limits(container: Mapping[str, Any]) -> Mapping[str, Any]:
    limits: Mapping[str, Any] = (container.get("resources") or {}).get("limits") or {}
    return limits
