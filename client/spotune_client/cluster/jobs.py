"""FinetuneJobs as the API server returns them: find one by name, and read its status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from spotune.crd.definition import FINETUNE_JOBS
from spotune.custom_resource.object_names import JOB_LABEL
from spotune.custom_resource.status import referenced
from spotune.custom_resource.status import with_cause as replaced_reference
from spotune_client.cluster.client import Cluster, Manifest
from spotune_client.cluster.resources import get_object, list_objects, object_path, pods_with

Job = Mapping[str, Any]


def list_jobs(cluster: Cluster, *, everywhere: bool = False) -> list[Manifest]:
    """The jobs of the namespace, or of all namespaces, sorted by namespace and name.

    Raises:
        KubernetesError: The user may not list them, or FinetuneJobs are not installed.
    """
    return list_objects(cluster, FINETUNE_JOBS, everywhere=everywhere)


def get_job(cluster: Cluster, name: str) -> Manifest:
    """Get a job by name.

    Raises:
        UsageError: It does not exist; the message suggests a similar name.
        KubernetesError: The user may not read it, or FinetuneJobs are not installed.
    """
    return get_object(cluster, FINETUNE_JOBS, name)


def job_path(cluster: Cluster, name: str) -> str:
    """URL path of a job."""
    return object_path(cluster, FINETUNE_JOBS, name)


def pods_of(cluster: Cluster, name: str, component: str = "") -> list[Manifest]:
    """The pods of a job, including terminating ones.

    Args:
        cluster: The cluster with the job.
        name: Name of the job.
        component: ``head`` or ``workers``; empty: both.
    """
    return pods_with(cluster, JOB_LABEL, name, component)


def status_of(job: Job) -> Mapping[str, Any]:
    """The status; empty before the operator has written one."""
    found: Mapping[str, Any] = job.get("status") or {}
    return found


def conditions_of(job: Job) -> Sequence[Mapping[str, Any]]:
    """The conditions, in the operator's order."""
    found: Sequence[Mapping[str, Any]] = status_of(job).get("conditions") or ()
    return found


def condition(job: Job, name: str) -> Mapping[str, Any] | None:
    """The condition with the given type, or None."""
    return next((found for found in conditions_of(job) if found["type"] == name), None)


def is_true(job: Job, name: str) -> bool:
    """Whether the condition with the given type has status True."""
    found = condition(job, name)
    return found is not None and found["status"] == "True"


def is_current(job: Job) -> bool:
    """Whether the operator has processed the current spec."""
    observed: int = status_of(job).get("observedGeneration") or 0
    return observed >= (job["metadata"].get("generation") or 0)


def outcome(job: Job) -> Literal["Complete", "Failed"] | None:
    """How the job ended; None if it has not ended, or if its spec has changed since."""
    if not is_current(job):
        return None
    return "Complete" if is_true(job, "Complete") else "Failed" if is_true(job, "Failed") else None


def with_cause(job: Job, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The condition, with the message of the condition it refers to in place of the reference."""
    message = found.get("message") or ""
    cause = condition(job, referenced(message)) or {}
    return {**found, "message": replaced_reference(message, cause.get("message"))}


def reason_and_message(found: Mapping[str, Any]) -> str:
    """A condition's reason and message, for display."""
    reason, message = found.get("reason") or "", found.get("message") or ""
    return f"{reason}: {message}" if reason and message else reason or message


def phase(job: Job) -> str:
    """The phase of a job or service, for display."""
    if job["metadata"].get("deletionTimestamp"):
        return "Deleting"
    return status_of(job).get("phase") or "New"
