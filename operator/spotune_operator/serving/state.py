"""The observed state of a ModelService: plain values, parsed from the API server's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spotune_operator.children.serving.groups import GATEWAY
from spotune_operator.children.serving.network import CLUSTER_LABEL
from spotune_operator.children.serving.ray_service import SPEC_ANNOTATION
from spotune_operator.children.serving.resolved_service import SERVICE_LABEL
from spotune_operator.children.serving.serve_config import APPLICATION
from spotune_operator.kube.applier import ChildKey
from spotune_operator.kube.digest import content_digest
from spotune_operator.kube.timestamps import unix_time
from spotune_operator.observe.nodes import NodeView
from spotune_operator.observe.pod_problems import PodProblem, pod_problem
from spotune_operator.serving.scaling import RayClusterView

ServiceKey = tuple[str, str]
"""Namespace and name of a ModelService."""

_COMPONENT_LABEL: Final = "app.kubernetes.io/component"


@dataclass(frozen=True)
class ServicePod:
    """A pod of a service.

    Attributes:
        name: Its name.
        namespace: Its namespace.
        service: Name of the ModelService.
        component: ``head``, ``gateway`` or ``replicas``.
        cluster: Its RayCluster.
        ready: Whether it is ready and not terminating. For a replica this means that Ray Serve runs on it; the model
            may still be loading.
        problem: Why it does not start; None if no problem is known.
        uid: Its uid.
        node: Its node; empty before it is scheduled.
        deleting_since: Unix time of its deletion request; None without one.
        grace_seconds: Its grace period after that request.
    """

    name: str
    namespace: str
    service: str
    component: str
    cluster: str = ""
    ready: bool = False
    problem: PodProblem | None = None
    uid: str = ""
    node: str = ""
    deleting_since: float | None = None
    grace_seconds: float = 0.0


@dataclass(frozen=True)
class RayServiceState:
    """What KubeRay reports about a RayService.

    During an upgrade there are two clusters: the active one gets the requests, and KubeRay reports the application of
    the pending one alone.

    Attributes:
        application: Status of the newest Ray Serve application: empty before it is deployed, else ``NOT_STARTED``,
            ``DEPLOYING``, ``RUNNING``, ``UNHEALTHY``, ``DEPLOY_FAILED`` or ``DELETING``.
        message: Ray Serve's message about that application, or about its deployment that is not healthy.
        is_current: Whether KubeRay has processed the newest spec of the RayService.
        active_cluster: Name of the RayCluster that gets the requests; empty before the first application runs.
        pending_cluster: Name of the RayCluster that will replace it; empty without an upgrade.
        invalid: Why KubeRay refuses the RayService; empty if it does not.
    """

    application: str = ""
    message: str = ""
    is_current: bool = False
    active_cluster: str = ""
    pending_cluster: str = ""
    invalid: str = ""

    @property
    def is_upgrading(self) -> bool:
        """Whether KubeRay brings up another cluster beside the active one."""
        return bool(self.active_cluster and self.pending_cluster)


@dataclass(frozen=True)
class ServiceChild:
    """An object that the operator created for a service.

    Attributes:
        kind: Its kind.
        namespace: Its namespace.
        name: Its name.
        uid: Its uid.
        service: Name of the ModelService.
        digest: Hash of everything that a user or the operator may write.
        owner: uid of the object that controls it; empty without one.
        spec_digest: The annotation with the hash of the spec that the operator applied last; empty without it.
        deleting: Whether it is being deleted.
        ray: Of a RayService: what KubeRay reports.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    service: str
    digest: str
    owner: str = ""
    spec_digest: str = ""
    deleting: bool = False
    ray: RayServiceState | None = None


@dataclass(frozen=True)
class TrainedModel:
    """What the operator knows of a FinetuneJob whose model is to be served.

    Attributes:
        output: ``status.output``: ``pvc://claim/path`` once the model is trained; empty before.
        step: ``status.step``.
        phase: ``status.phase``.
        has_failed: Whether the job has failed for good.
    """

    output: str
    step: int
    phase: str
    has_failed: bool = False


@dataclass(frozen=True)
class ObservedService:
    """The observed state of a service: all input of a decision but the service itself.

    Attributes:
        provider_ids: ``spec.providerID`` of the cluster's nodes.
        jobs: The FinetuneJobs that the service names, by name; absent: no such job.
        children: The service's children by kind and name.
        clusters: The RayClusters that KubeRay created for it.
        pods: The service's pods.
        nodes: The nodes of these pods, by name.
        refused: The API server's message for each kind of child that it rejected at the last apply.
    """

    provider_ids: Sequence[str] = ()
    jobs: Mapping[str, TrainedModel] = field(default_factory=dict)
    children: Mapping[ChildKey, ServiceChild] = field(default_factory=dict)
    clusters: Sequence[RayClusterView] = ()
    pods: Sequence[ServicePod] = ()
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def ray_service(self) -> ServiceChild | None:
        """The RayService; None if there is none."""
        return next((child for (kind, _), child in self.children.items() if kind == "RayService"), None)

    @property
    def ray(self) -> RayServiceState:
        """What KubeRay reports; empty without a RayService."""
        child = self.ray_service
        return (child.ray if child is not None else None) or RayServiceState()

    @property
    def pod_problem(self) -> PodProblem | None:
        """Why pods do not start, in the order head, gateway, replicas; else why KubeRay cannot create them."""
        ranked = sorted(self.pods, key=lambda pod: (pod.component != "head", pod.component != GATEWAY, pod.name))
        found = [pod.problem for pod in ranked] + [cluster.problem for cluster in self.clusters]
        return next((problem for problem in found if problem is not None), None)

    def ready_pods(self, component: str) -> int:
        """Number of ready pods of a component in the active cluster."""
        cluster = self.ray.active_cluster
        return sum(pod.ready for pod in self.pods if pod.component == component and pod.cluster == cluster)


def service_pod_view(raw: Mapping[str, Any]) -> ServicePod:
    """The view of a ``v1.Pod`` of a service."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels = metadata.get("labels") or {}
    deadline = unix_time(metadata.get("deletionTimestamp"))
    grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions") or ())
    return ServicePod(
        name=metadata["name"],
        namespace=metadata["namespace"],
        service=labels.get(SERVICE_LABEL, ""),
        component=labels.get(_COMPONENT_LABEL, ""),
        cluster=labels.get(CLUSTER_LABEL, ""),
        ready=ready and "deletionTimestamp" not in metadata,
        problem=pod_problem(raw) if "deletionTimestamp" not in metadata else None,
        uid=metadata["uid"],
        node=(raw.get("spec") or {}).get("nodeName", ""),
        deleting_since=deadline - grace if deadline is not None else None,
        grace_seconds=grace,
    )


def service_child_view(raw: Mapping[str, Any], kind: str) -> ServiceChild:
    """The view of a child of any kind."""
    metadata = raw["metadata"]
    return ServiceChild(
        kind=kind,
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        service=(metadata.get("labels") or {}).get(SERVICE_LABEL, ""),
        digest=content_digest(raw),
        owner=next((each["uid"] for each in metadata.get("ownerReferences") or () if each.get("controller")), ""),
        spec_digest=(metadata.get("annotations") or {}).get(SPEC_ANNOTATION, ""),
        deleting="deletionTimestamp" in metadata,
        ray=_ray_service_state(raw) if kind == "RayService" else None,
    )


def _ray_service_state(raw: Mapping[str, Any]) -> RayServiceState:
    status = raw.get("status") or {}
    active, pending = status.get("activeServiceStatus") or {}, status.get("pendingServiceStatus") or {}
    newest = pending if pending.get("rayClusterName") else active
    application = (newest.get("applicationStatuses") or {}).get(APPLICATION) or {}
    return RayServiceState(
        application=application.get("status", ""),
        message=_message(application),
        is_current=status.get("observedGeneration") == raw["metadata"].get("generation"),
        active_cluster=active.get("rayClusterName", ""),
        pending_cluster=pending.get("rayClusterName", ""),
        invalid=next((each.get("message", "") for each in status.get("conditions") or () if _is_invalid(each)), ""),
    )


def _is_invalid(condition: Mapping[str, Any]) -> bool:
    """Whether a condition of a RayService says that KubeRay refuses its spec."""
    return condition["type"] == "Ready" and condition.get("reason") == "ValidationFailed"


def _message(application: Mapping[str, Any]) -> str:
    """The message of the first deployment that is not healthy; else the application's own."""
    deployments = application.get("serveDeploymentStatuses") or {}
    unhealthy = (each for each in deployments.values() if each.get("status") != "HEALTHY" and each.get("message"))
    return str(next((each["message"] for each in unhealthy), application.get("message", "")))
