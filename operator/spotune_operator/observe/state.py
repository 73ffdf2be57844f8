"""The observed state of a job: plain values, parsed from the API server's objects.

Of each object only the fields that decisions need are kept, so that a thousand jobs fit into little memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spotune.custom_resource.object_names import COMPONENT_LABEL as COMPONENT_LABEL
from spotune.custom_resource.object_names import GROUP_LABEL as GROUP_LABEL
from spotune.custom_resource.object_names import JOB_LABEL
from spotune.custom_resource.pod_problems import PodProblem, pod_problem
from spotune.units.timestamps import unix_time
from spotune_operator.kube.digest import content_digest
from spotune_operator.kueue.names import cannot_be_admitted, is_held_back
from spotune_operator.observe.job_services import JobService
from spotune_operator.observe.nodes import PREFIX, NodeView
from spotune_operator.observe.supervisor_status import PollResult
from spotune_operator.providers import GPU_RESOURCE

TEMPLATE_ANNOTATION: Final = f"{PREFIX}template"
"""Annotation of pods: a hash of the template that they were created from."""

JobKey = tuple[str, str]
"""Namespace and name of a job."""


@dataclass(frozen=True)
class Pod:
    """A pod of a job.

    Attributes:
        name: Its name.
        namespace: Its namespace.
        uid: Its uid.
        job: Name of the job.
        component: ``head`` or ``workers``.
        group: KubeRay's worker group.
        template: Hash of the template that it was created from; empty without the annotation.
        node: Its node; empty before it is scheduled.
        ip: Its address; empty before it has one.
        phase: ``Pending``, ``Running``, ``Succeeded`` or ``Failed``.
        ready: Whether its condition ``Ready`` is true.
        created: Unix time.
        started: Unix time at which its first container started; None before.
        deleting_since: Unix time of its deletion request; None without one.
        grace_seconds: Its grace period after that request.
        gpus: Number of GPUs of its containers.
        held_back: Whether Kueue holds it back, because it has no quota.
        problem: Why it does not start; None if no problem is known.
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
    held_back: bool = False
    problem: PodProblem | None = None

    @property
    def runs(self) -> bool:
        """Whether it runs and is not terminating."""
        return self.phase == "Running" and self.deleting_since is None


@dataclass(frozen=True)
class Child:
    """An object that the operator created for a job.

    Attributes:
        kind: Its kind.
        namespace: Its namespace.
        name: Its name.
        uid: Its uid.
        job: Name of the job.
        digest: Hash of everything that a user or the operator may write.
        deleting: Whether it is being deleted.
        phase: Of a claim: ``Pending``, ``Bound`` or ``Lost``.
        storage_class: Of a claim.
        capacity: Of a claim: the size of its volume, as a quantity.
        suspended: Of a RayCluster: ``spec.suspend``.
        cannot_be_admitted: Of a RayCluster in a queue: whether Kueue can admit it only if it is created anew.
        groups: Of a RayCluster: name and number of workers of each group.
        problem: Of a RayCluster: why KubeRay cannot create its pods.
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
    cannot_be_admitted: bool = False
    groups: Sequence[tuple[str, int]] = ()
    problem: PodProblem | None = None


@dataclass(frozen=True)
class Observed:
    """The observed state of a job: all input of a decision but the job itself.

    Attributes:
        provider_ids: ``spec.providerID`` of the cluster's nodes.
        storage_classes: StorageClasses by name, as the API server has them; None: not known yet.
        children: The job's children, by kind.
        services: The ModelServices that the job controls, by name; empty while the operator serves no models.
        pods: The job's pods.
        nodes: The nodes of these pods, and the unfit ones that exist, by name.
        all_nodes: All nodes of the cluster.
        poll: The last poll of the supervisor; None without a head pod.
        refused: The API server's message for each kind of child that it rejected at the last apply.
        missing_claims: Names of claims that the job names and that do not exist. None: not known.
        created: Unix time of the job's creation.
        changed_elsewhere_at: Unix time at which this operator first saw what somebody else has written to the job; 0 if
            the last write was its own.
    """

    provider_ids: Sequence[str] = ()
    storage_classes: Mapping[str, Mapping[str, Any]] | None = None
    children: Mapping[str, Child] = field(default_factory=dict)
    services: Mapping[str, JobService] = field(default_factory=dict)
    pods: Sequence[Pod] = ()
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    all_nodes: Sequence[NodeView] = ()
    poll: PollResult | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    missing_claims: Sequence[str] | None = ()
    created: float = 0.0
    changed_elsewhere_at: float = 0.0

    @property
    def head(self) -> Pod | None:
        """The head pod that is not terminating; None if there is none."""
        return next((pod for pod in self.pods if pod.component == "head" and pod.deleting_since is None), None)

    @property
    def pod_problem(self) -> PodProblem | None:
        """Why pods do not start: the head's problem, else a worker's, else why KubeRay cannot create them."""
        staying = (pod for pod in self.pods if pod.deleting_since is None)
        for pod in sorted(staying, key=lambda pod: (pod.component != "head", pod.name)):
            if pod.problem is not None:
                return pod.problem
        cluster = self.children.get("RayCluster")
        return cluster.problem if cluster is not None else None

    @property
    def workers(self) -> list[Pod]:
        """The worker pods that are not terminating."""
        return [pod for pod in self.pods if pod.component == "workers" and pod.deleting_since is None]


def pod_view(raw: Mapping[str, Any]) -> Pod:
    """The view of a ``v1.Pod``."""
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
        held_back=is_held_back(spec),
        problem=pod_problem(raw),
    )


def child_view(raw: Mapping[str, Any], kind: str) -> Child:
    """The view of a child of any kind."""
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
        cannot_be_admitted=cannot_be_admitted(spec),
        groups=tuple(
            (group["groupName"], int(group.get("replicas") or 0)) for group in spec.get("workerGroupSpecs") or ()
        ),
        problem=pod_problem(raw) if kind == "RayCluster" else None,
    )


def _first_start(status: Mapping[str, Any]) -> float | None:
    starts = [
        unix_time(((container.get("state") or {}).get("running") or {}).get("startedAt"))
        for container in status.get("containerStatuses") or ()
    ]
    return min((start for start in starts if start is not None), default=None)


def _limits(container: Mapping[str, Any]) -> Mapping[str, Any]:
    limits: Mapping[str, Any] = (container.get("resources") or {}).get("limits") or {}
    return limits
