"""Events about a job: one for each condition that turned, and for each restart. Each is named by what it tells of.

The name makes an Event that is written again, after a crash between it and the status, the same Event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from spotune.job import API_VERSION, KIND, Condition, FinetuneJobStatus
from spotune_operator.kube.conditions import Finding, find
from spotune_operator.kube.timestamps import rfc3339
from spotune_operator.observe.caches import KnownJob
from spotune_operator.observe.state import digest

_CAUSES: Final = {
    "worker_lost": "a worker was lost",
    "head_lost": "the head was lost",
    "preempted": "a node was reclaimed",
    "hang": "the workers gave no sign of life",
    "app_error": "the model, the data or the code failed",
    "out_of_memory": "a worker ran out of memory",
}
_QUIET: Final = frozenset({"Reconciling", "ClusterReady", "DataPrepared", "Training", "CheckpointHealthy"})
"""Conditions that turn as a matter of course, or whose turns ``Ready`` tells."""
_LONGEST: Final = 1000


def job_events(
    job: KnownJob, previous: FinetuneJobStatus, status: FinetuneJobStatus, now: float
) -> Iterator[dict[str, Any]]:
    """``v1.Event``s about what is new in a status.

    Args:
        job: The FinetuneJob.
        previous: The status before.
        status: The status now.
        now: Unix time.
    """
    told: set[str] = set()
    for condition in status.conditions:
        before = find(previous.conditions, condition.type)
        text = condition.message or _spelled(condition)
        if _is_news(before, condition) and text not in told:  # of two conditions that say the same, one
            told.add(text)
            since = before.last_transition_time if before is not None else ""
            warning = Finding(condition.type, condition.status, condition.reason).is_warning
            yield _event(job, condition.reason, text, now, (condition.type, since), warning=warning)
    for cause, words in _CAUSES.items():
        count = getattr(status.restarts, cause)
        if count > getattr(previous.restarts, cause):
            step = f"; training goes on from step {status.last_checkpoint.step}" if status.last_checkpoint else ""
            yield _event(job, "Restarted", f"{words}{step}", now, (cause, str(count)), warning=True)


def _is_news(before: Condition | None, now: Condition) -> bool:
    """Whether a condition has come true, or is true no longer; a suspension is news already when it begins."""
    if now.type in _QUIET or (before is not None and before.status == now.status):
        return False
    was = before is not None and before.status == "True"
    return was or now.status == "True" or (now.type == "Suspended" and now.status == "Unknown")


def _spelled(condition: Condition) -> str:
    return f"{condition.type} is {condition.status}"


def _event(
    job: KnownJob, reason: str, message: str, now: float, about: tuple[str, ...], *, warning: bool
) -> dict[str, Any]:
    time = rfc3339(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{job.name}.{digest([job.uid, reason, *about])}",
            "namespace": job.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:_LONGEST],
        "source": {"component": "spotune"},
        "reportingComponent": "spotune",
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
