"""The phase of a job: one word for people, in ``status.phase``."""

from __future__ import annotations

from collections.abc import Mapping

from spotune_operator.kube.conditions import Finding
from spotune_operator.observe.supervisor_status import Freshness
from spotune_operator.reconcile.desired_state import ReconcileContext

_WITHOUT_PODS = ("", "Provisioning", "Restarting", "Suspending", "Suspended")
"""Phases in which no pods run, or are to run."""


def phase(context: ReconcileContext, findings: Mapping[str, Finding], previous: str) -> str:
    """The phase of a job.

    Args:
        context: The input of the reconcile.
        findings: All findings, by type.
        previous: The phase after the last reconcile; empty before the first.
    """
    if context.outcome is not None:
        return "Complete" if context.outcome == "trained" else "Failed"
    if findings["Stalled"].status == "True":
        return "Stalled"
    if context.must_pause:
        return "Suspended" if findings["Suspended"].status == "True" else "Suspending"
    if context.is_paused:
        return "Restarting"
    head = context.observed.head
    if head is None or not head.runs:
        return "Provisioning"
    return _phase_of_supervisor(context, previous)


def _phase_of_supervisor(context: ReconcileContext, previous: str) -> str:
    """The phase that the supervisor reports; the previous one while its progress is unknown."""
    if context.is_still_stopping:
        return "Starting"
    if not context.has_own_progress:
        return previous if previous not in _WITHOUT_PODS else "Starting"
    if not context.preflight_passed:
        return "Preflight"
    if context.freshness is Freshness.DRIVER_SILENT:
        return "Recovering"
    reported = context.progress.phase or "Starting"
    return {"Done": "Exporting", "Failed": "Starting"}.get(reported, reported)
