"""The report of a job in a cluster: written by a pod of our own on the job's volume, whether there is a head or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from spotune_operator.cli.cluster.jobs import get_job
from spotune_operator.cli.cluster.kubeconfig import Target, open_cluster
from spotune_operator.cli.cluster.volume_pod import job_directory, reader_pod, refuse_failure, started

_SECONDS = 300


def report_of_job(name: str, namespace: str, kubeconfig: Path | None, context: str) -> str:
    """The page about a job.

    Raises:
        UsageError: There is no such job.
        KubernetesError: The pod may not be made, does not start, or finds nothing.
    """
    cluster = open_cluster(Target(namespace, kubeconfig, context))
    job = get_job(cluster, name)
    command = ["python", "-m", "spotune_trainer.report", job_directory(job)]
    with started(cluster, reader_pod(job, "report", command, _SECONDS), partial(typer.echo, err=True)) as pod:
        lines = list(cluster.lines(f"{cluster.path('pods', pod)}/log", follow="true"))
        refuse_failure(cluster, pod, lines[-1] if lines else "")
    return "".join(f"{line}\n" for line in lines)
