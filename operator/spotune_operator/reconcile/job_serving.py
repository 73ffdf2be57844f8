"""The ModelService of a job with ``spec.serving``: its life-cycle, and the condition ``Served``. Pure.

It is created when the model is trained. While the job is trained further it stays, and serves the former model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spotune.service import SERVICE_KIND
from spotune_operator.kube.conditions import Finding
from spotune_operator.observe.job_services import JobService
from spotune_operator.reconcile.desired_state import ReconcileContext

SERVED: Final = "Served"
"""Type of the condition; a job without ``spec.serving`` does not have it."""


def service_to_apply(manifest: Mapping[str, Any] | None, context: ReconcileContext) -> dict[str, Any] | None:
    """The ModelService to apply; None while there is none to create or to repair."""
    if manifest is None or not context.settings.serving:
        return None
    service = context.observed.services.get(context.job.service_name)
    if service is not None and service.deleting:
        return None  # an apply would change the old object; its successor is created when it is gone
    return dict(manifest) if service is not None or context.outcome == "trained" else None


def services_to_delete(context: ReconcileContext) -> Sequence[JobService]:
    """The ModelServices of the job that its spec no longer asks for: without ``spec.serving``, or of a former name."""
    desired = context.job.service_name
    return [found for name, found in context.observed.services.items() if name != desired and not found.deleting]


def served_finding(context: ReconcileContext) -> Finding | None:
    """The condition ``Served``; None without ``spec.serving``."""
    name = context.job.service_name
    if not name:
        return None
    if not context.settings.serving:
        message = "spec.serving needs an operator that serves models: install the chart with serving.enabled=true"
        return Finding(SERVED, "False", "ServingDisabled", message)
    if refusal := context.observed.refused.get(SERVICE_KIND):
        return Finding(SERVED, "False", "Refused", refusal)
    service = context.observed.services.get(name)
    if service is not None and service.ready:
        return Finding(SERVED, "True", "Serving", f"the ModelService {name} answers requests at {service.url}")
    if service is not None:
        message = f"the ModelService {name} is not ready: {service.message or 'it is starting'}"
        return Finding(SERVED, "False", service.reason or "Starting", message)
    if context.outcome == "trained":
        return Finding(SERVED, "False", "Creating", f"the ModelService {name} is being created")
    return Finding(SERVED, "False", "NotTrained", f"the ModelService {name} is created when the model is trained")


def not_of_this_job(name: str) -> str:
    """Why a ModelService of the desired name is left alone."""
    return (
        f"spec.serving.name: a ModelService {name} exists that this job did not create: set another name, or delete "
        "that ModelService"
    )
