"""``Ready``, ``Reconciling`` and ``Stalled``, which kstatus, Argo CD and Flux read: derived from the other findings.

``Stalled`` means that only a person can help. These tools show its message alone, so it holds the cause in full, with
one exception: for a failed preflight it names the checks, and refers to ``PreflightPassed`` for their messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spotune.service import SERVICE_KIND
from spotune_operator.errors import StalledError
from spotune_operator.kube.conditions import Finding, reference
from spotune_operator.observe.existing_claims import SECOND_LOOKUP_SECONDS
from spotune_operator.reconcile.condition_findings import failed_checks
from spotune_operator.reconcile.desired_state import ReconcileContext

NEED_A_USER = frozenset(
    {
        *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"),
        *("FailedCreateHeadPod", "FailedCreateWorkerPod"),  # without quotas, which have a reason of their own
    }
)
"""Pod problems that do not go away by waiting."""


def kstatus_findings(context: ReconcileContext, findings: Mapping[str, Finding]) -> Iterator[Finding]:
    """``Ready``, ``Stalled`` and ``Reconciling``; ``Stalled`` alone while the progress of training is unknown.

    Args:
        context: The input of the reconcile.
        findings: The other findings, by type.
    """
    stalled = _stalled(context, findings)
    yield stalled
    ready = _ready(context, findings, stalled)
    if ready is None:
        return
    yield ready
    is_settled = "True" in (ready.status, stalled.status, findings["Suspended"].status)
    if context.outcome is not None or is_settled:
        yield Finding("Reconciling", "False", ready.reason)
    else:
        yield Finding("Reconciling", "True", ready.reason, ready.message)


def stalled_findings(error: Exception) -> list[Finding]:
    """The findings about a job whose spec cannot be applied."""
    reason = error.reason if isinstance(error, StalledError) else "InvalidSpec"
    return [
        Finding("Ready", "False", reason, reference("Stalled")),
        Finding("Reconciling", "False", reason),
        Finding("Stalled", "True", reason, str(error)),
    ]


def _ready(context: ReconcileContext, findings: Mapping[str, Finding], stalled: Finding) -> Finding | None:
    """The finding of the condition that decides; None while training is unknown, so that ``Ready`` stays unchanged."""
    suspended, training = findings["Suspended"], findings.get("Training")
    if context.outcome == "trained":
        return Finding("Ready", "True", "Complete", "the model is trained")
    if context.outcome == "failed":
        return Finding("Ready", "False", "Failed", reference("Failed"))
    if stalled.status == "True":
        return Finding("Ready", "False", stalled.reason, reference("Stalled"))
    if suspended.status != "False":
        return Finding("Ready", "False", suspended.reason, suspended.message)
    return Finding("Ready", training.status, training.reason, training.message) if training is not None else None


def _stalled(context: ReconcileContext, findings: Mapping[str, Finding]) -> Finding:
    """Whether only a person can help."""
    if context.outcome == "failed":
        return Finding("Stalled", "True", "Failed", findings["Failed"].message)
    if context.outcome is None:
        refused = {kind: why for kind, why in context.observed.refused.items() if kind != SERVICE_KIND}  # see Served
        for kind, message in refused.items():
            return Finding("Stalled", "True", "Refused", f"the API server rejected the {kind}: {message}")
        storage = findings["StorageReady"]
        may_follow = context.now - context.observed.created < SECOND_LOOKUP_SECONDS
        if storage.reason == "ClaimNotFound" and not may_follow and not context.must_pause:
            return Finding("Stalled", "True", "ClaimNotFound", storage.message)
        problem = context.observed.pod_problem
        if problem is not None and problem.reason in NEED_A_USER:
            return Finding("Stalled", "True", problem.reason, problem.message)
        if findings["PreflightPassed"].reason == "CheckFailed":
            names = [check.name for check in failed_checks(context)]
            checks = f"check {names[0]}" if len(names) == 1 else f"checks {', '.join(names)}"
            message = f"preflight {checks} failed; {reference('PreflightPassed')}"
            return Finding("Stalled", "True", "PreflightFailed", message)
    return Finding("Stalled", "False", "NothingToMend", "no action is needed")
