"""The conditions of a ModelService."""

from __future__ import annotations

from dataclasses import dataclass

from spotune.service import ModelService
from spotune_operator.children.serving.groups import GATEWAY, REPLICAS
from spotune_operator.children.serving.serve_config import APPLICATION
from spotune_operator.kube.conditions import Finding, reference
from spotune_operator.reconcile.kstatus import NEED_A_USER, stalled_findings
from spotune_operator.serving.model_location import Models
from spotune_operator.serving.rollout import ROLLED_OUT, Rollout
from spotune_operator.serving.state import ApplicationState, ObservedService, RayServiceState, last_line

_NEED_A_USER = NEED_A_USER | {"DeployFailed", "ValidationFailed"}
"""Reasons that do not go away by waiting."""
_NOT_INSTALLED = ("404 page not found", "the server could not find the requested resource")
"""The API server's messages for a kind of a group that is not installed, and for one that its group lacks."""
_NO_GATEWAY_API = "; spec.httpRoute needs the Gateway API (v1): install it with a controller, or use spec.ingress"


@dataclass(frozen=True)
class ServiceContext:
    """The input of the conditions.

    Attributes:
        service: The service.
        models: Where its model is.
        observed: The state of the cluster.
        is_applied: Whether the RayService in the cluster has the desired spec.
        rollout: The versions that run; None while the model is not available.
        ready_replicas: Number of replicas in the active cluster that take requests.
    """

    service: ModelService
    models: Models
    observed: ObservedService
    is_applied: bool
    rollout: Rollout | None
    ready_replicas: int

    @property
    def ray(self) -> RayServiceState:
        """What KubeRay reports; empty without a RayService."""
        return self.observed.ray

    @property
    def is_deployed(self) -> bool:
        """Whether the active cluster has the newest spec, and serves the newest version."""
        is_applied = self.is_applied and self.ray.is_current and (self.rollout is None or self.rollout.pending is None)
        return is_applied and bool(self.ray.active_cluster) and not self.ray.is_upgrading

    @property
    def rolled_back(self) -> bool:
        """Whether the version that the spec asks for was rolled back."""
        finding = self.rollout.finding if self.rollout is not None else None
        return finding is not None and finding.reason == "RolledBack"

    @property
    def application(self) -> ApplicationState:
        """The state of the gateway and the served version; of a candidate, the condition ``RolledOut`` tells."""
        served = [planned.version.application for planned in self.rollout.versions[:1]] if self.rollout else []
        return self.ray.worst_of([APPLICATION, *served])


def service_findings(context: ServiceContext) -> list[Finding]:
    """All conditions of a service whose spec is valid."""
    model, replicas = context.models.finding, _replicas_ready(context)
    stalled = _stalled(context, replicas)
    ready = _ready(context, model, replicas, stalled)
    reconciling = _reconciling(context, model, replicas, ready, stalled)
    rolled_out = context.rollout.finding if context.rollout is not None else None
    return [ready, reconciling, stalled, _suspended(context), model, replicas, *([rolled_out] if rolled_out else [])]


def stalled_service_findings(error: Exception, observed: ObservedService, ready_replicas: int) -> list[Finding]:
    """The conditions of a service whose spec cannot be applied; a running one still answers requests."""
    ready, *others = stalled_findings(error)
    return [_SERVING if _answers(observed, ready_replicas) else ready, *others]


_SERVING = Finding("Ready", "True", "Serving", "the endpoint answers requests")


def _answers(observed: ObservedService, ready_replicas: int, *, scales_to_zero: bool = False) -> bool:
    """Whether the active cluster has a gateway, and a replica unless the service may have none."""
    return bool(observed.ready_pods(GATEWAY)) and (scales_to_zero or ready_replicas > 0)


def _ready(context: ServiceContext, model: Finding, replicas: Finding, stalled: Finding) -> Finding:
    """Whether the endpoint answers requests, be it with the former model or with fewer replicas than desired."""
    if context.service.spec.suspend:
        return Finding("Ready", "False", "Suspended", "spec.suspend is true")
    if _answers(context.observed, context.ready_replicas, scales_to_zero=context.service.spec.replicas.min == 0):
        return _SERVING
    if stalled.status == "True":
        return Finding("Ready", "False", stalled.reason, reference("Stalled"))
    if model.status != "True":
        return Finding("Ready", "False", model.reason, reference("ModelAvailable"))
    if replicas.status != "True":
        return Finding("Ready", "False", replicas.reason, reference("ReplicasReady"))
    return Finding("Ready", "False", "GatewayNotReady", f"no gateway pod is ready{_hint_about_keys(context)}")


def _hint_about_keys(context: ServiceContext) -> str:
    """A pod whose Secret is missing looks like one that starts normally."""
    keys = context.service.spec.api_keys_secret_ref
    return f"; it needs the Secret {keys.name} with the key {keys.key}" if keys is not None else ""


def _reconciling(
    context: ServiceContext, model: Finding, replicas: Finding, ready: Finding, stalled: Finding
) -> Finding:
    """Whether the operator still works towards the spec."""
    if stalled.status == "True":
        return Finding("Reconciling", "False", stalled.reason)
    if context.service.spec.suspend:
        return Finding("Reconciling", "False", "Suspended")
    if model.status != "True":
        return Finding("Reconciling", "True", model.reason, model.message)
    for finding in (ready, replicas):
        if finding.status != "True":
            return Finding("Reconciling", "True", finding.reason, finding.message)
    if not context.is_deployed:
        if context.rollout is not None and context.rollout.status is not None:
            return Finding("Reconciling", "True", "RollingOut", reference(ROLLED_OUT))
        return Finding("Reconciling", "True", "Upgrading", "the former version is served until the new one is ready")
    return Finding("Reconciling", "False", "Deployed")


def _suspended(context: ServiceContext) -> Finding:
    if not context.service.spec.suspend:
        return Finding("Suspended", "False", "NotSuspended")
    if context.observed.pods:
        return Finding("Suspended", "Unknown", "Suspending", f"{len(context.observed.pods)} pods are stopping")
    return Finding("Suspended", "True", "Suspended", "spec.suspend is true: no pods run")


def _replicas_ready(context: ServiceContext) -> Finding:
    """Whether the newest application runs with as many replicas as the minimum, and why not."""
    observed, ray = context.observed, context.ray
    if observed.ray_service is None:
        return Finding("ReplicasReady", "False", "NotDeployed", "the Ray cluster is not created yet")
    if ray.invalid:
        return Finding("ReplicasReady", "False", "ValidationFailed", f"KubeRay refuses the RayService: {ray.invalid}")
    application = context.application
    if application.status == "DEPLOY_FAILED":
        return Finding("ReplicasReady", "False", "DeployFailed", last_line(application.message))
    ready, minimum = context.ready_replicas, context.service.spec.replicas.min
    is_short = ready < minimum or application.status != "RUNNING" or not observed.ready_pods(GATEWAY)
    problem = observed.pod_problem
    if observed.given_up_pods and (problem is None or problem.reason not in _NEED_A_USER):
        left = len(observed.given_up_pods)
        message = f"no Ray cluster serves yet, so the new one replaces the old one (pods left of it: {left})"
        return Finding("ReplicasReady", "False", "ReplacingCluster", message)
    if is_short and problem is not None:
        return Finding("ReplicasReady", "False", problem.reason, problem.message)
    if ready < minimum:
        message = f"{ready} of {minimum} replicas are ready{_hint_about_loading(context)}"
        return Finding("ReplicasReady", "False", "WaitingForReplicas", message)
    if application.status != "RUNNING":
        state = application.status or "not deployed yet"
        detail = f": {application.message}" if application.message else ""
        return Finding("ReplicasReady", "False", "Deploying", f"the Ray Serve application is {state}{detail}")
    message = f"{ready} replicas are ready" if ready else "scaled to zero: the next request starts a replica"
    return Finding("ReplicasReady", "True", "Ready", message)


def _hint_about_loading(context: ServiceContext) -> str:
    """Why ready pods have no replica that takes requests; empty if there is none, or if it is not known."""
    if context.observed.unused_pods:
        return ", Ray places none on a ready pod: the pod will be replaced"
    loading = len(context.observed.ready_pods(REPLICAS)) - context.ready_replicas
    return f", {loading} loading the model" if loading and context.observed.traffic.running_replicas is not None else ""


def _stalled(context: ServiceContext, replicas: Finding) -> Finding:
    """Whether only a person can help."""
    for kind, message in context.observed.refused.items():
        remedy = _NO_GATEWAY_API if kind == "HTTPRoute" and message in _NOT_INSTALLED else ""
        return Finding("Stalled", "True", "Refused", f"the API server rejected the {kind}: {message}{remedy}")
    model = context.models.finding
    if model.reason == "JobFailed" or (model.reason == "ClaimNotFound" and not context.service.spec.suspend):
        return Finding("Stalled", "True", model.reason, model.message)
    if replicas.reason in _NEED_A_USER:
        return Finding("Stalled", "True", replicas.reason, replicas.message)
    rolled_out = context.rollout.finding if context.rollout is not None else None
    if rolled_out is not None and rolled_out.reason == "MetricMissing":
        return Finding("Stalled", "True", rolled_out.reason, rolled_out.message)
    if context.observed.route_not_accepted:
        return Finding("Stalled", "True", "RouteNotAccepted", context.observed.route_not_accepted)
    return Finding("Stalled", "False", "NothingToMend", "no action is needed")
