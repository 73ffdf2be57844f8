"""The HTML report of a job: a temporary pod on the job's volume renders the page."""

from __future__ import annotations

from typing import Final

from spotune_client.cluster.client import Cluster
from spotune_client.cluster.container_log import whole_log
from spotune_client.cluster.jobs import get_job
from spotune_client.cluster.volume_pod import (
    HeadTemplate,
    Notify,
    job_directory,
    pinned_template,
    raise_if_failed,
    running_pod,
    volume_pod_manifest,
)

_SECONDS: Final = 300


def report_page(cluster: Cluster, name: str, notify: Notify, head_template: HeadTemplate = pinned_template) -> str:
    """The HTML report of a job.

    Args:
        cluster: The cluster with the job.
        name: Name of the job.
        notify: Prints a progress message.
        head_template: Finds the template of the head, for the pod that renders the page.

    Raises:
        UsageError: The job does not exist.
        KubernetesError: The pod cannot be created, does not start, or fails.
    """
    job = get_job(cluster, name)
    command = ["python", "-m", "spotune_trainer.observability.report", job_directory(job, head_template)]
    with running_pod(cluster, volume_pod_manifest(job, "report", command, _SECONDS, head_template), notify) as pod:
        lines = list(whole_log(cluster, pod))
        raise_if_failed(cluster, pod, lines[-1] if lines else "")
    return "".join(f"{line}\n" for line in lines)
