"""The observed state of a ModelService: plain values, parsed from the API server's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spotune_operator.children.serving.groups import GATEWAY
from spotune_operator.children.serving.resolved_service import SERVICE_LABEL
from spotune_operator.children.serving.serve_config import APPLICATION
from spotune_operator.kube.applier import ChildKey
from spotune_operator.kube.digest import content_digest
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
        ready: Whether it is ready and not terminating.
        problem: Why it does not start; None if no problem is known.
    """

    name: str
    namespace: str
    service: str
    component: str
    ready: bool = False
    problem: PodProblem | None = None


@dataclass(frozen=True)
class RayServiceState:
    """What KubeRay reports about a RayService.

    Attributes:
        application: Status of the Ray Serve application: empty before it is deployed, else ``NOT_STARTED``,
            ``DEPLOYING``, ``RUNNING``, ``UNHEALTHY``, ``DEPLOY_FAILED`` or ``DELETING``.
        message: Ray Serve's message about the application, or about the deployment that is not healthy.
        is_current: Whether KubeRay has processed the newest spec.
        is_upgrading: Whether KubeRay brings up another cluster beside the serving one.
        active_cluster: Name of the RayCluster that answers requests; empty before the application runs.
    """

    application: str = ""
    message: str = ""
    is_current: bool = False
    is_upgrading: bool = False
    active_cluster: str = ""


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
        deleting: Whether it is being deleted.
        ray: Of a RayService: what KubeRay reports.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    service: str
    digest: str
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
        refused: The API server's message for each kind of child that it rejected at the last apply.
    """

    provider_ids: Sequence[str] = ()
    jobs: Mapping[str, TrainedModel] = field(default_factory=dict)
    children: Mapping[ChildKey, ServiceChild] = field(default_factory=dict)
    clusters: Sequence[RayClusterView] = ()
    pods: Sequence[ServicePod] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def ray_service(self) -> ServiceChild | None:
        """The RayService; None if there is none."""
        return next((child for (kind, _), child in self.children.items() if kind == "RayService"), None)

    @property
    def pod_problem(self) -> PodProblem | None:
        """Why pods do not start; the first problem in the order head, gateway, replicas."""
        ranked = sorted(self.pods, key=lambda pod: (pod.component != "head", pod.component != GATEWAY, pod.name))
        return next((pod.problem for pod in ranked if pod.problem is not None), None)

    def ready_pods(self, component: str) -> int:
        """Number of ready pods of a component."""
        return sum(pod.ready for pod in self.pods if pod.component == component)


def service_pod_view(raw: Mapping[str, Any]) -> ServicePod:
    """The view of a ``v1.Pod`` of a service."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels = metadata.get("labels") or {}
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions") or ())
    return ServicePod(
        name=metadata["name"],
        namespace=metadata["namespace"],
        service=labels.get(SERVICE_LABEL, ""),
        component=labels.get(_COMPONENT_LABEL, ""),
        ready=ready and "deletionTimestamp" not in metadata,
        problem=pod_problem(raw) if "deletionTimestamp" not in metadata else None,
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
        deleting="deletionTimestamp" in metadata,
        ray=_ray_service_state(raw) if kind == "RayService" else None,
    )


def _ray_service_state(raw: Mapping[str, Any]) -> RayServiceState:
    """The state of a RayService: of its active cluster or, before there is one, of its pending cluster."""
    status = raw.get("status") or {}
    active, pending = status.get("activeServiceStatus") or {}, status.get("pendingServiceStatus") or {}
    applications = active.get("applicationStatuses") or pending.get("applicationStatuses") or {}
    application = applications.get(APPLICATION) or {}
    return RayServiceState(
        application=application.get("status", ""),
        message=_message(application),
        is_current=status.get("observedGeneration") == raw["metadata"].get("generation"),
        is_upgrading=bool(active.get("rayClusterName")) and bool(pending.get("rayClusterName")),
        active_cluster=active.get("rayClusterName", ""),
    )


def _message(application: Mapping[str, Any]) -> str:
    """The message of the first deployment that is not healthy; else the application's own."""
    deployments = application.get("serveDeploymentStatuses") or {}
    unhealthy = (each for each in deployments.values() if each.get("status") != "HEALTHY" and each.get("message"))
    return str(next((each["message"] for each in unhealthy), application.get("message", "")))
