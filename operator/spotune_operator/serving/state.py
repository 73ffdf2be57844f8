"""The observed state of a ModelService: plain values, parsed from the API server's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spotune.custom_resource.object_names import CLUSTER_LABEL
from spotune.custom_resource.pod_problems import UNSCHEDULABLE, PodProblem, pod_problem
from spotune.units.timestamps import unix_time
from spotune_operator.children.serving.groups import GATEWAY, REPLICAS
from spotune_operator.children.serving.ray_service import CLUSTER_ANNOTATION, SPEC_ANNOTATION
from spotune_operator.children.serving.resolved_service import SERVICE_LABEL
from spotune_operator.kube.applier import ChildKey
from spotune_operator.kube.digest import content_digest
from spotune_operator.observe.job_services import controller_uid
from spotune_operator.observe.nodes import NodeView
from spotune_operator.observe.state import COMPONENT_LABEL, GROUP_LABEL
from spotune_operator.providers import GPU_RESOURCE
from spotune_operator.serving.gateway_stats import Traffic
from spotune_operator.serving.scaling import RayClusterView, ReplicaPod

ServiceKey = tuple[str, str]
"""Namespace and name of a ModelService."""

_WORST_FIRST: Final = ("DEPLOY_FAILED", "", "NOT_STARTED", "DELETING", "UNHEALTHY", "DEPLOYING", "RUNNING")
"""Ray Serve's states of an application."""

_ROUTE_REMEDIES: Final = {
    "NoMatchingListenerHostname": "give its listener one of spec.httpRoute.hostnames, or a wildcard for it",
    "NoMatchingParent": "correct spec.httpRoute.parentRefs: the Gateway has no such listener",
    "NotAllowedByListeners": "allow routes of this namespace in its listener (allowedRoutes)",
    "UnsupportedValue": "if its controller has no timeouts, set spec.httpRoute.disableTimeout to false",
}
"""What to do, by the Gateway API's reason why a route is not accepted."""


@dataclass(frozen=True)
class ServicePod:
    """A pod of a service.

    Attributes:
        name: Its name.
        namespace: Its namespace.
        service: Name of the ModelService.
        component: ``head``, ``gateway`` or ``replicas``.
        cluster: Its RayCluster.
        group: Its worker group.
        created: RFC 3339 time of its creation.
        address: Its IP address; empty before it has one.
        ready: Whether it is ready and not terminating. For a replica this means that Ray Serve runs on it; the model
            may still be loading.
        ready_since: RFC 3339 time since which ``ready`` has its value.
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
    group: str = ""
    created: str = ""
    address: str = ""
    ready: bool = False
    ready_since: str = ""
    problem: PodProblem | None = None
    uid: str = ""
    node: str = ""
    deleting_since: float | None = None
    grace_seconds: float = 0.0


@dataclass(frozen=True)
class ApplicationState:
    """What Ray Serve reports about an application.

    Attributes:
        status: Empty before it is deployed, else ``NOT_STARTED``, ``DEPLOYING``, ``RUNNING``, ``UNHEALTHY``,
            ``DEPLOY_FAILED`` or ``DELETING``.
        message: The message about the application, or about its deployment that is not healthy.
        is_complete: Whether all its deployments have all their replicas.
    """

    status: str = ""
    message: str = ""
    is_complete: bool = False


@dataclass(frozen=True)
class RayServiceState:
    """What KubeRay reports about a RayService.

    During an upgrade there are two clusters: the active one gets the requests, and KubeRay reports the applications of
    the pending one alone.

    Attributes:
        applications: Ray Serve's applications in the newest cluster, by name; empty while its head is not ready.
        is_current: Whether KubeRay has processed the newest spec of the RayService.
        active_cluster: Name of the RayCluster that gets the requests; empty before the first application runs.
        pending_cluster: Name of the RayCluster that will replace it; empty without an upgrade.
        invalid: Why KubeRay refuses the RayService; empty if it does not.
    """

    applications: Mapping[str, ApplicationState] = field(default_factory=dict)
    is_current: bool = False
    active_cluster: str = ""
    pending_cluster: str = ""
    invalid: str = ""

    @property
    def is_upgrading(self) -> bool:
        """Whether KubeRay brings up another cluster beside the active one."""
        return bool(self.active_cluster and self.pending_cluster)

    def has_given_up(self, cluster: str) -> bool:
        """Whether KubeRay replaces a cluster by the pending one before any cluster got requests."""
        return bool(self.pending_cluster) and not self.active_cluster and cluster != self.pending_cluster

    def worst_of(self, names: Sequence[str]) -> ApplicationState:
        """The state of the application that is furthest from running."""
        states = [self.applications.get(name, ApplicationState()) for name in names]
        return min(states, key=lambda state: _WORST_FIRST.index(state.status) if state.status in _WORST_FIRST else 0)


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
        cluster_digest: The annotation with the hash of that part of it whose change makes another cluster.
        deleting: Whether it is being deleted.
        ray: Of a RayService: what KubeRay reports.
        not_accepted: Of an HTTPRoute: why a Gateway does not accept it; empty if none reports that.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    service: str
    digest: str
    owner: str = ""
    spec_digest: str = ""
    cluster_digest: str = ""
    deleting: bool = False
    ray: RayServiceState | None = None
    not_accepted: str = ""


@dataclass(frozen=True)
class TrainedModel:
    """What the operator knows of a FinetuneJob whose model is to be served.

    Attributes:
        output: ``status.output`` once the model is trained: ``pvc://claim/path`` or ``s3://bucket/path``; empty before.
        step: ``status.trained.step``, of the exported weights; ``status.step`` if a trainer does not report it.
        phase: ``status.phase``.
        has_failed: Whether the job has failed for good.
        scores: Metrics of its last evaluation by name, the loss as ``loss``.
        task: ``spec.model.task``; empty: not known.
    """

    output: str
    step: int
    phase: str
    has_failed: bool = False
    scores: Mapping[str, float] = field(default_factory=dict)
    task: str = ""


@dataclass(frozen=True)
class ObservedService:
    """The observed state of a service: all input of a decision but the service itself.

    Attributes:
        provider_ids: ``spec.providerID`` of the cluster's nodes.
        jobs: The FinetuneJobs that the service names, by name; absent: no such job.
        children: The service's children by kind and name.
        clusters: The RayClusters that KubeRay created for it.
        pods: The service's pods.
        traffic: What the gateways report about their requests.
        nodes: The nodes of these pods, by name.
        refused: The API server's message for each kind of child that it rejected at the last apply.
        missing_claims: Names of claims that the service names and that do not exist. None: not known.
    """

    provider_ids: Sequence[str] = ()
    jobs: Mapping[str, TrainedModel] = field(default_factory=dict)
    children: Mapping[ChildKey, ServiceChild] = field(default_factory=dict)
    clusters: Sequence[RayClusterView] = ()
    pods: Sequence[ServicePod] = ()
    traffic: Traffic = field(default_factory=Traffic)
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    missing_claims: Sequence[str] | None = ()

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
    def route_not_accepted(self) -> str:
        """Why a Gateway does not accept the HTTPRoute; empty if none reports that."""
        return next((child.not_accepted for child in self.children.values() if child.not_accepted), "")

    @property
    def pod_problem(self) -> PodProblem | None:
        """Why pods do not start, in the order head, gateway, replicas; else why KubeRay cannot create them.

        If pods of several components fit no node, all are named, the one without a GPU first: users have to change it.
        """
        staying = [pod for pod in self.pods if not self.ray.has_given_up(pod.cluster)]
        ranked = sorted(staying, key=lambda pod: (pod.component != "head", pod.component != GATEWAY, pod.name))
        clusters = [cluster.problem for cluster in self.clusters if not self.ray.has_given_up(cluster.name)]
        found = [pod.problem for pod in ranked] + clusters
        first = next((problem for problem in found if problem is not None), None)
        return _unschedulable(ranked) if first is not None and first.reason == UNSCHEDULABLE else first

    @property
    def given_up_pods(self) -> list[ServicePod]:
        """Pods of Ray clusters that KubeRay gave up before any got requests."""
        return [pod for pod in self.pods if self.ray.has_given_up(pod.cluster)]

    @property
    def given_up_clusters(self) -> list[RayClusterView]:
        """Ray clusters that KubeRay gave up before any got requests, for the pending one, which exists.

        A view of the RayService that is older than that of the clusters must not show the newest cluster as given up:
        it is not older than the pending one.
        """
        child, name = self.ray_service, self.ray.pending_cluster
        pending = next((cluster for cluster in self.clusters if cluster.name == name), None)
        if child is None or pending is None:
            return []
        given_up = [cluster for cluster in self.clusters if self.ray.has_given_up(cluster.name)]
        return [each for each in given_up if each.owner == child.uid and each.created <= pending.created]

    @property
    def gateways(self) -> list[str]:
        """Addresses of the ready gateway pods of the active cluster."""
        return [pod.address for pod in self.ready_pods(GATEWAY)]

    @property
    def replica_pods(self) -> list[ReplicaPod]:
        """The pods with replicas, the oldest first."""
        pods = sorted(self.pods, key=lambda pod: (pod.created, pod.name))
        return [ReplicaPod(pod.name, pod.cluster, pod.group) for pod in pods if pod.component == REPLICAS]

    def ready_pods(self, component: str) -> list[ServicePod]:
        """The ready pods of a component in the active cluster."""
        cluster = self.ray.active_cluster
        return [pod for pod in self.pods if pod.ready and pod.component == component and pod.cluster == cluster]

    @property
    def unused_pods(self) -> list[ServicePod]:
        """Ready pods in the active cluster on which Ray places no replica, while one has waited for a pod for long."""
        used = self.traffic.replica_addresses
        if used is None or not self.traffic.has_unplaced_replica:
            return []
        return [pod for pod in self.ready_pods(REPLICAS) if pod.address not in used]

    def ready_replicas(self, before: int) -> int:
        """Number of replicas in the active cluster that have loaded their model and take requests, on ready pods.

        While Ray Serve's number is not known, it can only become less.

        Args:
            before: The number of the last reconcile.
        """
        pods, traffic = len(self.ready_pods(REPLICAS)), self.traffic
        if traffic.running_replicas is not None:
            return min(pods, traffic.running_replicas)
        return pods if traffic.no_replica_report else min(pods, before)


def service_pod_view(raw: Mapping[str, Any]) -> ServicePod:
    """The view of a ``v1.Pod`` of a service."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels = metadata.get("labels") or {}
    deadline = unix_time(metadata.get("deletionTimestamp"))
    grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
    conditions: dict[str, Mapping[str, str]] = {item["type"]: item for item in status.get("conditions") or ()}
    condition = conditions.get("Ready", {})
    return ServicePod(
        name=metadata["name"],
        namespace=metadata["namespace"],
        service=labels.get(SERVICE_LABEL, ""),
        component=labels.get(COMPONENT_LABEL, ""),
        cluster=labels.get(CLUSTER_LABEL, ""),
        group=labels.get(GROUP_LABEL, ""),
        created=metadata.get("creationTimestamp", ""),
        address=status.get("podIP", ""),
        ready=condition.get("status") == "True" and "deletionTimestamp" not in metadata,
        ready_since=condition.get("lastTransitionTime", ""),
        problem=pod_problem(raw) if "deletionTimestamp" not in metadata else None,
        uid=metadata["uid"],
        node=(raw.get("spec") or {}).get("nodeName", ""),
        deleting_since=deadline - grace if deadline is not None else None,
        grace_seconds=grace,
    )


def service_child_view(raw: Mapping[str, Any], kind: str) -> ServiceChild:
    """The view of a child of any kind."""
    metadata = raw["metadata"]
    annotations = metadata.get("annotations") or {}
    return ServiceChild(
        kind=kind,
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        service=(metadata.get("labels") or {}).get(SERVICE_LABEL, ""),
        digest=content_digest(raw),
        owner=controller_uid(raw),
        spec_digest=annotations.get(SPEC_ANNOTATION, ""),
        cluster_digest=annotations.get(CLUSTER_ANNOTATION, ""),
        deleting="deletionTimestamp" in metadata,
        ray=_ray_service_state(raw) if kind == "RayService" else None,
        not_accepted=_not_accepted(raw) if kind == "HTTPRoute" else "",
    )


def _not_accepted(raw: Mapping[str, Any]) -> str:
    """Why a Gateway does not accept the current spec of an HTTPRoute; empty if none reports that."""
    for parent in (raw.get("status") or {}).get("parents") or ():
        for condition in parent.get("conditions") or ():
            is_current = condition.get("observedGeneration") == raw["metadata"].get("generation")
            if condition["type"] == "Accepted" and condition["status"] == "False" and is_current:
                reason, message = condition.get("reason", ""), condition.get("message", "")
                remedy = f"; {_ROUTE_REMEDIES[reason]}" if reason in _ROUTE_REMEDIES else ""
                name = parent["parentRef"]["name"]
                return f"the Gateway {name} does not accept the HTTPRoute: {reason}: {message}{remedy}"
    return ""


def _ray_service_state(raw: Mapping[str, Any]) -> RayServiceState:
    status = raw.get("status") or {}
    active, pending = status.get("activeServiceStatus") or {}, status.get("pendingServiceStatus") or {}
    newest = pending if pending.get("rayClusterName") else active
    applications = newest.get("applicationStatuses") or {}
    return RayServiceState(
        applications={name: _application_state(application or {}) for name, application in applications.items()},
        is_current=status.get("observedGeneration") == raw["metadata"].get("generation"),
        active_cluster=active.get("rayClusterName", ""),
        pending_cluster=pending.get("rayClusterName", ""),
        invalid=next((each.get("message", "") for each in status.get("conditions") or () if _is_invalid(each)), ""),
    )


def _is_invalid(condition: Mapping[str, Any]) -> bool:
    """Whether a condition of a RayService says that KubeRay refuses its spec."""
    return condition["type"] == "Ready" and condition.get("reason") == "ValidationFailed"


def _application_state(application: Mapping[str, Any]) -> ApplicationState:
    """The state of an application, with the message of its first deployment that is not healthy, else its own."""
    deployments = (application.get("serveDeploymentStatuses") or {}).values()
    unhealthy = [each for each in deployments if each.get("status") != "HEALTHY"]
    message = next((each["message"] for each in unhealthy if each.get("message")), application.get("message", ""))
    return ApplicationState(application.get("status", ""), str(message), is_complete=not unhealthy)


def _unschedulable(pods: Sequence[ServicePod]) -> PodProblem:
    """The problems of pods that fit no node as one, by component; that of a missing GPU first."""
    problems: dict[str, str] = {}
    for pod in pods:
        if pod.problem is not None and pod.problem.reason == UNSCHEDULABLE:
            problems.setdefault(pod.component, pod.problem.message)
    if len(problems) == 1:
        return PodProblem(UNSCHEDULABLE, *problems.values())
    ranked = sorted(problems.items(), key=lambda found: f"Insufficient {GPU_RESOURCE}" not in found[1])
    return PodProblem(UNSCHEDULABLE, "; ".join(f"{name}: {message.rstrip('.')}" for name, message in ranked))


def last_line(message: str) -> str:
    """The last line of a traceback: the error itself."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "the Ray Serve application cannot be deployed: see the logs of the head pod"
