"""The decision of one reconcile of a ModelService: which children to apply and delete, and the new status. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from spotune.service import ModelService, ModelServiceStatus
from spotune_operator.children.serving import build_service_children
from spotune_operator.children.serving.groups import REPLICAS
from spotune_operator.children.serving.resolved_service import ResolvedService, resolve_service
from spotune_operator.kube.conditions import Finding, updated
from spotune_operator.providers import PROVIDERS, Provider, ProviderName, detect
from spotune_operator.reconcile.kstatus import stalled_findings
from spotune_operator.serving.findings import ServiceContext, service_findings
from spotune_operator.serving.model_location import Models, locate_models, version_status
from spotune_operator.serving.scaling import Resize, resizes
from spotune_operator.serving.state import ObservedService, ServiceChild
from spotune_operator.settings import Settings

Manifest = dict[str, Any]

_OPTIONAL: Final = frozenset({"RayService", "PodDisruptionBudget", "Ingress"})
"""Kinds of children that a service may cease to have; the operator may delete these and no others."""


@dataclass(frozen=True)
class ServiceDecision:
    """The desired state of a service.

    Attributes:
        apply: Manifests of the desired children, in order.
        delete: Children to delete.
        resize: Changes of the numbers of pods of running clusters.
        status: The new status.
        requeue_after: Seconds until the next reconcile without an event; None: none is needed.
    """

    apply: Sequence[Manifest]
    delete: Sequence[ServiceChild]
    resize: Sequence[Resize]
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
        StalledError: The spec cannot be applied in this cluster; ``stalled_service`` makes the status for it.
    """
    models = locate_models(service, observed, previous)
    resolved = _resolve(service, models, uid, previous, observed, settings)
    children = build_service_children(resolved) if resolved is not None else []
    return ServiceDecision(
        apply=children,
        delete=_unwanted(service, children, observed),
        resize=resizes(resolved, observed.clusters) if resolved is not None else [],
        status=_status(ServiceContext(service, models, observed), resolved, previous, generation, now),
        requeue_after=settings.refused_seconds if observed.refused else None,
    )


def stalled_service(previous: ModelServiceStatus, error: Exception, generation: int, now: float) -> ModelServiceStatus:
    """The status of a service whose spec cannot be applied; its running pods are left alone."""
    conditions = updated(previous.conditions, stalled_findings(error), generation, now)
    changes = {"observed_generation": generation, "phase": "Stalled", "conditions": conditions}
    return previous.model_copy(update=changes)


def _unwanted(service: ModelService, desired: Sequence[Manifest], observed: ObservedService) -> list[ServiceChild]:
    """Children to delete: those that the spec no longer asks for, such as the RayService of a suspended service."""
    kept = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in desired}
    optional = _OPTIONAL if desired else {"RayService"} if service.spec.suspend else set()
    return [
        child
        for key, child in observed.children.items()
        if child.kind in optional and key not in kept and not child.deleting
    ]


def _resolve(
    service: ModelService,
    models: Models,
    uid: str,
    previous: ModelServiceStatus,
    observed: ObservedService,
    settings: Settings,
) -> ResolvedService | None:
    """The service with all defaults resolved; None while its model is not available."""
    if models.model is None or not models.are_available:
        return None
    return resolve_service(
        service,
        _provider(service, observed),
        model=models.model,
        adapters=models.adapters,
        image=previous.default_image or settings.serve_image,
        ray_version=settings.ray_version,
        uid=uid,
        operator_namespace=settings.namespace,
        monitoring_namespace=settings.monitoring_namespace,
        active_cluster=_active_cluster(observed),
    )


def _active_cluster(observed: ObservedService) -> str:
    """Name of the RayCluster that answers requests; empty before there is one."""
    child = observed.ray_service
    return child.ray.active_cluster if child is not None and child.ray is not None else ""


def _provider(service: ModelService, observed: ObservedService) -> Provider:
    named = service.spec.cluster.provider
    return detect(observed.provider_ids) if named == "auto" else PROVIDERS[ProviderName(named)]


def _status(
    context: ServiceContext,
    resolved: ResolvedService | None,
    previous: ModelServiceStatus,
    generation: int,
    now: float,
) -> ModelServiceStatus:
    findings = {finding.type: finding for finding in service_findings(context)}
    spec, observed = context.service.spec, context.observed
    ready = observed.ready_pods(REPLICAS)
    changes: dict[str, Any] = {
        "observed_generation": generation,
        "phase": _phase(context, findings),
        "replicas": f"{ready}/{spec.replicas.min}" if not spec.replicas.autoscales else _scaled(ready, context),
        "ready_replicas": ready,
        "ray_service": observed.ray_service.name if observed.ray_service is not None else "",
        "conditions": updated(previous.conditions, findings.values(), generation, now),
    }
    if resolved is not None and context.models.model is not None:
        changes |= {
            "model": version_status(context.models.model),
            "adapters": {name: version_status(found) for name, found in context.models.adapters.items()},
            "url": resolved.url,
            "image": resolved.image,
            "default_image": previous.default_image if spec.cluster.image else resolved.image,
        }
    return previous.model_copy(update=changes)


def _scaled(ready: int, context: ServiceContext) -> str:
    """Ready and existing replicas of a service whose number of replicas follows the load."""
    existing = sum(pod.component == REPLICAS for pod in context.observed.pods)
    return f"{ready}/{max(existing, context.service.spec.replicas.min)}"


def _phase(context: ServiceContext, findings: dict[str, Finding]) -> str:
    """One word for people."""
    if findings["Stalled"].status == "True":
        return "Stalled"
    if context.service.spec.suspend:
        return "Suspended" if findings["Suspended"].status == "True" else "Suspending"
    if findings["Ready"].status == "True":
        return "Upgrading" if context.ray.is_upgrading else "Serving"
    if findings["ModelAvailable"].status != "True":
        return "WaitingForModel"
    return "Deploying" if context.observed.ray_service is not None else "Provisioning"
