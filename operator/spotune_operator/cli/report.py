"""`spotune report` for a job in a cluster: a temporary pod on the job's volume renders the HTML page."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from spotune_operator.cli.cluster.jobs import get_job
from spotune_operator.cli.cluster.kubeconfig import ClusterOptions, open_cluster
from spotune_operator.cli.cluster.volume_pod import job_directory, raise_if_failed, running_pod, volume_pod_manifest

_SECONDS = 300


def report_of_job(name: str, namespace: str, kubeconfig: Path | None, context: str) -> str:
    """The HTML report of a job.

    Raises:
        UsageError: The job does not exist.
        KubernetesError: The pod cannot be created, does not start, or fails.
    """
    cluster = open_cluster(ClusterOptions(namespace, kubeconfig, context))
    job = get_job(cluster, name)
    command = ["python", "-m", "spotune_trainer.observability.report", job_directory(job)]
    with running_pod(
        cluster, volume_pod_manifest(job, "report", command, _SECONDS), partial(typer.echo, err=True)
    ) as pod:
        lines = list(cluster.lines(f"{cluster.path('pods', pod)}/log", follow="true"))
        raise_if_failed(cluster, pod, lines[-1] if lines else "")
    return "".join(f"{line}\n" for line in lines)
