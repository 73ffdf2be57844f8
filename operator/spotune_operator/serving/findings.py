"""The conditions of a ModelService."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spotune.service import ModelService
from spotune_operator.children.serving.groups import GATEWAY, REPLICAS
from spotune_operator.kube.conditions import Finding, reference
from spotune_operator.serving.model_location import Models
from spotune_operator.serving.state import ObservedService, RayServiceState

_NEED_A_USER = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"}
)
"""Pod problems that do not go away by waiting."""


@dataclass(frozen=True)
class ServiceContext:
    """The input of the conditions.

    Attributes:
        service: The service.
        models: Where its model is.
        observed: The state of the cluster.
    """

    service: ModelService
    models: Models
    observed: ObservedService

    @property
    def ray(self) -> RayServiceState:
        """What KubeRay reports; empty without a RayService."""
        child = self.observed.ray_service
        return (child.ray if child is not None else None) or RayServiceState()


def service_findings(context: ServiceContext) -> list[Finding]:
    """All conditions of a service whose spec is valid."""
    model, replicas = context.models.finding, _replicas_ready(context)
    stalled = _stalled(context, replicas)
    ready = _ready(context, model, replicas, stalled)
    reconciling = _reconciling(context, model, ready, stalled)
    return [ready, reconciling, stalled, *_suspended(context), model, replicas]


def _reconciling(context: ServiceContext, model: Finding, ready: Finding, stalled: Finding) -> Finding:
    """Whether the operator still works towards the spec; it may wait for a model while it serves the former one."""
    if stalled.status == "True" or context.service.spec.suspend:
        return Finding("Reconciling", "False", ready.reason)
    if model.status != "True":
        return Finding("Reconciling", "True", model.reason, model.message)
    if ready.status == "True":
        return Finding("Reconciling", "False", ready.reason)
    return Finding("Reconciling", "True", ready.reason, ready.message)


def _suspended(context: ServiceContext) -> Iterator[Finding]:
    if not context.service.spec.suspend:
        yield Finding("Suspended", "False", "NotSuspended")
    elif context.observed.pods:
        yield Finding("Suspended", "Unknown", "Suspending", f"{len(context.observed.pods)} pods are stopping")
    else:
        yield Finding("Suspended", "True", "Suspended", "spec.suspend is true: no pods run")


def _replicas_ready(context: ServiceContext) -> Finding:
    """Whether as many replicas as the minimum are ready, and why not."""
    replicas = context.service.spec.replicas
    ready = context.observed.ready_pods(REPLICAS)
    if context.observed.ray_service is None:
        return Finding("ReplicasReady", "False", "NotDeployed", "the Ray cluster is not created yet")
    if context.ray.application == "DEPLOY_FAILED":
        return Finding("ReplicasReady", "False", "DeployFailed", _failure(context.ray.message))
    if ready < replicas.min:
        problem = context.observed.pod_problem
        if problem is not None:
            return Finding("ReplicasReady", "False", problem.reason, problem.message)
        message = f"{ready} of {replicas.min} replicas are ready"
        return Finding("ReplicasReady", "False", "WaitingForReplicas", message)
    if context.ray.application != "RUNNING":
        state = context.ray.application or "not deployed yet"
        detail = f": {context.ray.message}" if context.ray.message else ""
        return Finding("ReplicasReady", "False", "Deploying", f"the Ray Serve application is {state}{detail}")
    message = f"{ready} replicas are ready" if ready else "scaled to zero: the next request starts a replica"
    return Finding("ReplicasReady", "True", "Ready", message)


def _failure(message: str) -> str:
    """The last line of a traceback: the error itself."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "the Ray Serve application cannot be deployed: see the logs of the head pod"


def _stalled(context: ServiceContext, replicas: Finding) -> Finding:
    """Whether only a person can help."""
    for kind, message in context.observed.refused.items():
        return Finding("Stalled", "True", "Refused", f"the API server rejected the {kind}: {message}")
    model = context.models.finding
    if model.reason == "JobFailed":
        return Finding("Stalled", "True", model.reason, model.message)
    if replicas.reason == "DeployFailed" or replicas.reason in _NEED_A_USER:
        return Finding("Stalled", "True", replicas.reason, replicas.message)
    return Finding("Stalled", "False", "NothingToMend", "no action is needed")


def _ready(context: ServiceContext, model: Finding, replicas: Finding, stalled: Finding) -> Finding:
    """Whether the endpoint answers requests."""
    if context.service.spec.suspend:
        return Finding("Ready", "False", "Suspended", "spec.suspend is true")
    if stalled.status == "True":
        return Finding("Ready", "False", stalled.reason, reference("Stalled"))
    if model.status != "True" and context.observed.ray_service is None:
        return Finding("Ready", "False", model.reason, reference("ModelAvailable"))
    if replicas.status != "True":
        return Finding("Ready", "False", replicas.reason, reference("ReplicasReady"))
    if not context.observed.ready_pods(GATEWAY):
        return Finding("Ready", "False", "GatewayNotReady", "no gateway pod is ready")
    return Finding("Ready", "True", "Serving", "the endpoint answers requests")
