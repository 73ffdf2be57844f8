"""Which conditions of a job or service are worth showing, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from spotune_client.cluster.jobs import Job, condition, conditions_of, is_true, status_of

_PROBLEMS: Final = ("Failed", "Stalled", "NotProgressing")
_OUTCOMES: Final = frozenset({"Complete", "Suspended"})
_SUMMARIES: Final = frozenset({"Ready", "Reconciling"})
"""Conditions that only summarize others."""
_ROUTINE: Final = frozenset(
    {"HeadPending", "WorkersPending", "NoWorkersYet", "Freed", "Released", "Deleted", "Running"}
)
"""Reasons of ``ClusterReady`` while pods start, run or end as they should."""


def main_problem(job: Job) -> Mapping[str, Any] | None:
    """The condition that says why a job cannot go on, or why some of its pods do not start; None without a problem."""
    for name in _PROBLEMS:
        if is_true(job, name):
            return condition(job, name)
    ready = condition(job, "ClusterReady")
    if ready is None or any(is_true(job, name) for name in _OUTCOMES):
        return None
    has_cause = "; " in (ready.get("message") or "")  # 3 of 4 workers run; 0/3 nodes are available
    return ready if ready.get("reason") not in _ROUTINE or (ready["status"] == "True" and has_cause) else None


def notable_conditions(job: Job) -> list[Mapping[str, Any]]:
    """The conditions worth showing: problems, unfinished work and outcomes.

    For an ended or suspended job, false conditions such as "not Training" are omitted. ClusterReady is shown while
    fewer workers run than desired, because its message gives the reason. Equal messages are shown once.
    """
    is_idle = any(is_true(job, name) for name in ("Complete", "Failed", "Suspended"))
    running, _, desired = (status_of(job).get("workers") or "").partition("/")
    shown: dict[str, Mapping[str, Any]] = {}
    for found in sorted(conditions_of(job), key=lambda found: found["type"] == "Stalled"):
        is_short = found["type"] == "ClusterReady" and running != desired and not is_idle
        if is_short or _is_notable(found, is_idle=is_idle):
            shown.setdefault(found.get("message") or found["type"], found)
    return list(shown.values())


def _is_notable(found: Mapping[str, Any], *, is_idle: bool) -> bool:
    name, status = found["type"], found["status"]
    if name in _SUMMARIES or (name == "CheckpointHealthy" and status == "Unknown"):
        return False
    if name in _PROBLEMS:
        return bool(status == "True")
    if name in _OUTCOMES:
        return bool(status != "False")
    return bool(status != "True") and not is_idle


def condition_heading(found: Mapping[str, Any]) -> str:
    """A condition's type with its status: ``Stalled``, ``not ClusterReady``."""
    prefix = {"True": "", "False": "not ", "Unknown": "not yet "}[found["status"]]
    return f"{prefix}{found['type']}"


def is_problem(found: Mapping[str, Any]) -> bool:
    """Whether a condition may need the user's attention."""
    return found["type"] in _PROBLEMS or (found["type"] not in _OUTCOMES and found["status"] == "False")
