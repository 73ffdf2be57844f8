"""The decision of one reconcile of a ModelService: which children to apply and delete, and the new status. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from spotune.service import ModelService, ModelServiceStatus, ServedVersionStatus
from spotune.units.timestamps import unix_time
from spotune_operator.children.serving import build_service_children
from spotune_operator.children.serving.groups import REPLICAS, min_replicas
from spotune_operator.children.serving.ray_service import SPEC_ANNOTATION, cluster_digest, pin
from spotune_operator.children.serving.resolved_service import (
    DefaultImages,
    DeployedVersion,
    ResolvedService,
    resolve_service,
)
from spotune_operator.kube.conditions import Finding, find, updated
from spotune_operator.observe.nodes import pods_on_reclaimed_nodes, stuck_pods
from spotune_operator.providers import PROVIDERS, Provider, ProviderName, detect
from spotune_operator.serving.findings import ServiceContext, service_findings, stalled_service_findings
from spotune_operator.serving.gateway_stats import UNPLACED_SECONDS
from spotune_operator.serving.model_location import locate_models, location_of, location_status, newest_version
from spotune_operator.serving.rollout import ROLLED_OUT, Planned, Rollout, RolloutInput, decide_rollout
from spotune_operator.serving.scaling import RayClusterView, ReplicaPod, Resize, cluster_resizes
from spotune_operator.serving.state import ObservedService, ServiceChild, ServicePod
from spotune_operator.settings import Settings

Manifest = dict[str, Any]

_TERMINATING_PODS_SECONDS: Final = 5.0
"""How often Terminating pods are checked: one on a dead node causes no event."""

_UNPLACED_REPLICA_SECONDS: Final = 15.0
"""How often unused pods are checked while a replica waits for one: that time passes causes no event."""

_OPTIONAL: Final = frozenset({"RayService", "PodDisruptionBudget", "Ingress", "HTTPRoute"})
"""Optional children: the operator deletes them when the spec no longer asks for them."""


@dataclass(frozen=True)
class ServiceDecision:
    """The desired state of a service.

    Attributes:
        apply: Manifests of the desired children, in order.
        delete: Children to delete.
        resize: Changes of the numbers of pods of running clusters.
        delete_gracefully: Replicas to delete gracefully, so that Ray drains them before the cloud reclaims their node.
        force_delete: Pods to delete without a grace period, because no kubelet will confirm their end.
        replace: Pods to delete because Ray uses them for no replica though one waits for a pod.
        give_up: Ray clusters to delete because KubeRay replaces them, and none has got requests yet.
        status: The new status.
        requeue_after: Seconds until the next reconcile without an event; None: none is needed.
    """

    apply: Sequence[Manifest]
    delete: Sequence[ServiceChild]
    resize: Sequence[Resize]
    delete_gracefully: Sequence[ServicePod]
    force_delete: Sequence[ServicePod]
    replace: Sequence[ServicePod]
    give_up: Sequence[RayClusterView]
    status: ModelServiceStatus
    requeue_after: float | None


def decide_service(
    service: ModelService,
    *,
    uid: str,
    generation: int,
    previous: ModelServiceStatus,
    observed: ObservedService,
    now: float,
    settings: Settings,
) -> ServiceDecision:
    """The decision about a valid service.

    While the model is not available, nothing is applied: a service that runs keeps its model.

    Args:
        service: The service.
        uid: Its ``metadata.uid``.
        generation: Its ``metadata.generation``.
        previous: The status of the last reconcile.
        observed: The state of the cluster.
        now: Unix time.
        settings: The operator's.

    Raises:
        StalledError: The spec cannot be applied in this cluster; ``decide_stalled_service`` makes the decision for it.
    """
    models = locate_models(service, observed, previous)
    target = newest_version(service, models, observed, previous)
    rollout, resolved = None, None
    if target is not None:
        base = _Base(service, uid, previous, observed, settings)
        rollout, resolved = _plan(base, target, now)
    children = build_service_children(resolved) if resolved is not None else []
    ready = observed.ready_replicas(previous.ready_replicas)
    is_applied = _is_applied(children, observed)
    context = ServiceContext(service, models, observed, is_applied, rollout, ready)
    return ServiceDecision(
        apply=children,
        delete=_unwanted(service, children, observed),
        resize=cluster_resizes(resolved, observed.clusters, _removable(previous, observed)) if resolved else [],
        status=_status(context, resolved, previous, generation, now),
        delete_gracefully=_replicas_to_notify(observed, settings),
        force_delete=stuck_pods(observed.pods, observed.nodes, now),
        replace=_pods_to_replace(observed, now),
        give_up=_clusters_to_delete(observed) if is_applied else [],
        requeue_after=_earliest(_requeue_after(observed, settings), rollout.requeue_after if rollout else None),
    )


def decide_stalled_service(
    error: Exception,
    *,
    generation: int,
    previous: ModelServiceStatus,
    observed: ObservedService,
    now: float,
    settings: Settings,
) -> ServiceDecision:
    """The decision about a service whose spec cannot be applied: its pods are left alone, except those of lost nodes.

    Args:
        error: Why it cannot be applied.
        generation: ``metadata.generation`` of the service.
        previous: The status of the last reconcile.
        observed: The state of the cluster.
        now: Unix time.
        settings: The operator's.
    """
    return ServiceDecision(
        apply=[],
        delete=[],
        resize=[],
        delete_gracefully=_replicas_to_notify(observed, settings),
        force_delete=stuck_pods(observed.pods, observed.nodes, now),
        replace=[],
        give_up=[],
        status=_stalled_status(previous, error, observed, generation, now),
        # An object that the error is about may have changed.
        requeue_after=_earliest(_requeue_after(observed, settings), settings.rejected_retry_seconds),
    )


def _stalled_status(
    previous: ModelServiceStatus, error: Exception, observed: ObservedService, generation: int, now: float
) -> ModelServiceStatus:
    ready = observed.ready_replicas(previous.ready_replicas)
    findings = stalled_service_findings(error, observed, ready)
    changes = {
        "observed_generation": generation,
        "phase": "Stalled",
        "ready_replicas": ready,
        "conditions": updated(previous.conditions, findings, generation, now),
    }
    return previous.model_copy(update=changes)


def _replicas_to_notify(observed: ObservedService, settings: Settings) -> list[ServicePod]:
    """Replicas on nodes that the cloud reclaims."""
    if not settings.heed_preemption:
        return []
    return pods_on_reclaimed_nodes([pod for pod in observed.pods if pod.component == REPLICAS], observed.nodes)


def _pods_to_replace(observed: ObservedService, now: float) -> list[ServicePod]:
    """The oldest pod that has no replica, if Ray has not placed a replica for long although the pod was ready.

    This happens if the head is lost right after its Ray has reserved the pod for a replica: the pod keeps the
    reservation, which the new head does not know (Ray 2.60). One pod at a time, in case there is another reason.
    """
    unused = [pod for pod in observed.unused_pods if now - (unix_time(pod.ready_since) or now) >= UNPLACED_SECONDS]
    return sorted(unused, key=lambda pod: (pod.created, pod.name))[:1]


def _clusters_to_delete(observed: ObservedService) -> list[RayClusterView]:
    """Clusters that must make room for the pending one: their pods may have the nodes that it needs.

    KubeRay itself keeps them as long as a request may take, which is right for a cluster that has got requests.
    """
    if not observed.ray.is_current:  # the pending cluster may be that of a former spec
        return []
    return [cluster for cluster in observed.given_up_clusters if not cluster.deleting]


def _requeue_after(observed: ObservedService, settings: Settings) -> float | None:
    """Seconds until the decision may change by the passage of time alone; None if it does not."""
    if any(pod.deleting_since is not None for pod in observed.pods):
        return _TERMINATING_PODS_SECONDS
    if observed.unused_pods:
        return _UNPLACED_REPLICA_SECONDS
    may_lack_claim = observed.missing_claims is None or bool(observed.missing_claims)
    return settings.rejected_retry_seconds if observed.refused or may_lack_claim else None


def _is_applied(desired: Sequence[Manifest], observed: ObservedService) -> bool:
    """Whether the RayService in the cluster has the desired spec."""
    child = observed.ray_service
    return child is not None and any(
        manifest["kind"] == "RayService" and manifest["metadata"]["annotations"][SPEC_ANNOTATION] == child.spec_digest
        for manifest in desired
    )


def _unwanted(service: ModelService, desired: Sequence[Manifest], observed: ObservedService) -> list[ServiceChild]:
    """Children to delete: those that the spec no longer asks for, such as the RayService of a suspended service."""
    kept = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in desired}
    optional = _OPTIONAL if desired else {"RayService"} if service.spec.suspend else set()
    return [
        child
        for key, child in observed.children.items()
        if child.kind in optional and key not in kept and not child.deleting
    ]


@dataclass(frozen=True)
class _Base:
    """What a resolved service is made from, besides its versions."""

    service: ModelService
    uid: str
    previous: ModelServiceStatus
    observed: ObservedService
    settings: Settings

    def resolve(self, planned: Sequence[Planned], claims: Sequence[str] | None) -> ResolvedService:
        """The service with all defaults resolved, with these versions and claims."""
        previous, settings = self.previous, self.settings
        return resolve_service(
            self.service,
            _provider(self.service, previous, self.observed),
            versions=[_deployed(each) for each in planned],
            claims=claims,
            images=self._images,
            ray_version=previous.default_ray_version or settings.ray_version,
            uid=self.uid,
            operator_namespace=settings.namespace,
            monitoring_namespace=settings.monitoring_namespace,
            active_cluster=self.observed.ray.active_cluster,
            pinned=previous.pinned,
        )

    @property
    def _images(self) -> DefaultImages:
        """The default images, pinned when the service is created. A service with one pinned image keeps that one."""
        previous, settings = self.previous, self.settings
        return DefaultImages.of(
            serve=previous.default_image or settings.serve_image,
            serve_vllm=previous.default_vllm_image or previous.default_image or settings.serve_vllm_image,
        )


def _plan(base: _Base, target: ServedVersionStatus, now: float) -> tuple[Rollout, ResolvedService]:
    """The versions that run, and the service with them.

    Pods keep the claims that they mount, even if no version needs one any longer: another set makes another cluster.

    Raises:
        StalledError: The spec cannot be applied in this cluster.
    """
    observed, previous = base.observed, base.previous
    child, planned = observed.ray_service, Planned(target, None, base.service.spec.replicas)
    has_pods = child is not None and cluster_digest(base.resolve([planned], previous.claims)) == child.cluster_digest
    rollout = decide_rollout(
        RolloutInput(
            spec=base.service.spec,
            target=target,
            previous=previous,
            ray=observed.ray,
            traffic=observed.traffic,
            ready_replicas=observed.ready_replicas(previous.ready_replicas),
            has_pods=has_pods,
            missing_claims=sorted(_deployed(planned).claims - set(previous.claims)),
            now=now,
        )
    )
    needed = {claim for each in rollout.versions for claim in _deployed(each).claims}
    return rollout, base.resolve(
        rollout.versions, previous.claims if has_pods and needed <= set(previous.claims) else None
    )


def _deployed(planned: Planned) -> DeployedVersion:
    version = planned.version
    return DeployedVersion(
        application=version.application,
        name=version.name,
        model=location_of(version),
        adapters={name: location_of(found) for name, found in version.adapters.items()},
        weight=planned.weight,
        replicas=planned.replicas,
        task=version.task,
    )


def _removable(previous: ModelServiceStatus, observed: ObservedService) -> list[ReplicaPod]:
    """The pods with replicas, in the order in which they are to be deleted.

    Ray Serve starts the replicas of a candidate on the pods that were added for it. So after a promotion the oldest
    pods have no replica, and after a rollback the newest.
    """
    condition = find(previous.conditions, ROLLED_OUT)
    pods = observed.replica_pods
    return pods[::-1] if condition is not None and condition.reason == "RolledBack" else pods


def _earliest(*seconds: float | None) -> float | None:
    return min((each for each in seconds if each is not None), default=None)


def _provider(service: ModelService, previous: ModelServiceStatus, observed: ObservedService) -> Provider:
    named = service.spec.cluster.provider
    if named != "auto":
        return PROVIDERS[ProviderName(named)]
    return PROVIDERS[ProviderName(previous.provider)] if previous.provider else detect(observed.provider_ids)


def _status(
    context: ServiceContext,
    resolved: ResolvedService | None,
    previous: ModelServiceStatus,
    generation: int,
    now: float,
) -> ModelServiceStatus:
    findings = {finding.type: finding for finding in service_findings(context)}
    spec, observed = context.service.spec, context.observed
    changes: dict[str, Any] = {
        "observed_generation": generation,
        "phase": _phase(context, findings),
        "replicas": f"{context.ready_replicas}/{_expected_replicas(context, resolved)}",
        "ready_replicas": context.ready_replicas,
        "ray_service": observed.ray_service.name if observed.ray_service is not None else "",
        "conditions": updated(previous.conditions, findings.values(), generation, now),
    }
    traffic = observed.traffic
    if traffic.requests_per_second is not None or not observed.gateways:
        changes["requests_per_second"] = traffic.requests_per_second
        changes["first_token_milliseconds_p50"] = traffic.first_token_milliseconds
    rollout = context.rollout
    if resolved is not None and rollout is not None:
        cluster = spec.cluster
        changes |= {
            "model": rollout.model,
            "pending_model": rollout.pending,
            "rollout": rollout.status,
            "rejected": rollout.rejected,
            "retiring": list(rollout.retiring),
            "claims": list(resolved.claims),
            # A suspended service has no pods: it starts again with the templates of this version of the operator.
            "pinned": pin(resolved) if not spec.suspend else None,
            "adapters": {name: location_status(found) for name, found in context.models.adapters.items()},
            "url": resolved.url,
            "image": resolved.image,
            "default_image": previous.default_image if cluster.image else resolved.images.serve,
            "default_vllm_image": previous.default_vllm_image if cluster.image else resolved.images.serve_vllm,
            "default_ray_version": previous.default_ray_version if cluster.ray_version else resolved.ray_version,
            "provider": previous.provider if cluster.provider != "auto" else resolved.provider.name.value,
        }
    return previous.model_copy(update=changes)


def _expected_replicas(context: ServiceContext, resolved: ResolvedService | None) -> int:
    """Number of replicas that there should be; as many as there are pods for them, if it follows the load."""
    expected = min_replicas(resolved) if resolved is not None else context.service.spec.replicas.min
    if not context.service.spec.replicas.autoscales:
        return expected
    return max(sum(pod.component == REPLICAS for pod in context.observed.pods), expected)


def _phase(context: ServiceContext, findings: dict[str, Finding]) -> str:
    """One word for people."""
    if findings["Stalled"].status == "True":
        return "Stalled"
    if context.service.spec.suspend:
        return "Suspended" if findings["Suspended"].status == "True" else "Suspending"
    if findings["Ready"].status == "True":
        if not context.is_deployed:
            return "Upgrading"
        return "RolledBack" if context.rolled_back else "Serving"
    if findings["ModelAvailable"].status != "True":
        return "WaitingForModel"
    return "Deploying" if context.observed.ray_service is not None else "Provisioning"
