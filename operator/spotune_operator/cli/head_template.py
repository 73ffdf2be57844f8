"""The pod template of a job's head, for the pods that read its volume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from spotune_client.cluster.jobs import Job, status_of
from spotune_client.cluster.volume_pod import pinned_template
from spotune_operator.children.pods import head_pod
from spotune_operator.children.resolved_job import resolve
from spotune_operator.providers import PROVIDERS, ProviderName


def head_template(job: Job) -> Mapping[str, Any]:
    """The pinned template, or the one that would be rendered if the job has not started yet.

    A job that was deleted and applied again has logs of its earlier attempts before it starts.

    Raises:
        JobError: The job has not started, and its spec is invalid.
    """
    if status_of(job).get("pinned"):
        return pinned_template(job)
    parsed = parse_job(Document({name: part for name, part in job.items() if name != "status"}))
    provider = parsed.spec.cluster.provider
    return head_pod(
        resolve(parsed, PROVIDERS[ProviderName.NONE if provider == "auto" else ProviderName(provider)])
    ).template
