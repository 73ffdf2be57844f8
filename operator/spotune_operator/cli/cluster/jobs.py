"""FinetuneJobs as the API server has them: finding one by its name, and how it stands.

They are read as plain mappings and not as models: whoever only looks at a job need not be of the operator's version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, Literal

from spotune.crd.definition import PLURAL
from spotune.errors import UsageError
from spotune.job import API_VERSION
from spotune_operator.children.resolved_job import JOB_LABEL
from spotune_operator.cli.cluster.client import Cluster, Manifest
from spotune_operator.errors import KubernetesError, NotFoundError

Job = Mapping[str, Any]

_NOT_INSTALLED: Final = (
    "this cluster does not know FinetuneJobs: spotune is not installed in it, or it is another one than you mean. "
    "`spotune doctor` says what is missing"
)

_NAMES_SHOWN: Final = 10


def list_jobs(cluster: Cluster, *, everywhere: bool = False) -> list[Manifest]:
    """The jobs of the namespace, or of all namespaces, in the order of their names.

    Raises:
        KubernetesError: The user may not see them, or the cluster has no such kind.
    """
    path = f"/apis/{API_VERSION}/{PLURAL}" if everywhere else cluster.path(PLURAL, group_version=API_VERSION)
    try:
        found = cluster.items(path)
    except NotFoundError as error:
        raise KubernetesError(_NOT_INSTALLED, error.status) from error
    return sorted(found, key=lambda job: (job["metadata"]["namespace"], job["metadata"]["name"]))


def get_job(cluster: Cluster, name: str) -> Manifest:
    """The job of a name.

    Raises:
        UsageError: There is none; says which name is like it.
        KubernetesError: The user may not see it, or the cluster has no such kind.
    """
    try:
        return cluster.get(job_path(cluster, name))
    except NotFoundError as error:
        names = [job["metadata"]["name"] for job in list_jobs(cluster)]
        raise UsageError(unknown_job(name, cluster.namespace, names)) from error


def job_path(cluster: Cluster, name: str) -> str:
    """Path of a job."""
    return cluster.path(PLURAL, name, API_VERSION)


def pods_of(cluster: Cluster, name: str, component: str = "") -> list[Manifest]:
    """The pods of a job, those that are on their way out included.

    Args:
        cluster: Where it is.
        name: Of the job.
        component: ``head`` or ``workers``; empty for both.
    """
    labels = [f"{JOB_LABEL}={name}", *([f"app.kubernetes.io/component={component}"] if component else [])]
    return cluster.items(cluster.path("pods"), labelSelector=",".join(labels))


def unknown_job(name: str, namespace: str, names: Sequence[str]) -> str:
    """That there is no such job, and which one may be meant."""
    near = get_close_matches(name, names, n=1)
    if near:
        return f"namespace {namespace} has no FinetuneJob {name}; did you mean {near[0]}?"
    there = "it has none at all"
    if names:
        there = f"it has {', '.join(names[:_NAMES_SHOWN])}{' and more' if len(names) > _NAMES_SHOWN else ''}"
    return f"namespace {namespace} has no FinetuneJob {name}: {there} (--namespace names another)"


def status_of(job: Job) -> Mapping[str, Any]:
    """The status; empty before the operator has seen the job."""
    found: Mapping[str, Any] = job.get("status") or {}
    return found


def conditions_of(job: Job) -> Sequence[Mapping[str, Any]]:
    """The conditions, in the operator's order."""
    found: Sequence[Mapping[str, Any]] = status_of(job).get("conditions") or ()
    return found


def condition(job: Job, name: str) -> Mapping[str, Any] | None:
    """The condition of a name, if it is there."""
    return next((found for found in conditions_of(job) if found["type"] == name), None)


def holds(job: Job, name: str) -> bool:
    """Whether a condition is there and true."""
    found = condition(job, name)
    return found is not None and found["status"] == "True"


def is_current(job: Job) -> bool:
    """Whether the operator has seen the job as it is now."""
    seen: int = status_of(job).get("observedGeneration") or 0
    return seen >= (job["metadata"].get("generation") or 0)


def outcome(job: Job) -> Literal["Complete", "Failed"] | None:
    """How the job ended; None while it has not, or has been changed since."""
    if not is_current(job):
        return None
    return "Complete" if holds(job, "Complete") else "Failed" if holds(job, "Failed") else None


def sentence(found: Mapping[str, Any]) -> str:
    """A condition's reason and message."""
    reason, message = found.get("reason") or "", found.get("message") or ""
    return f"{reason}: {message}" if reason and message else reason or message
