"""`spotune report` for a job in a cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster
from spotune_client.report import report_page
from spotune_operator.cli.head_template import head_template


def report_of_job(name: str, namespace: str, kubeconfig: Path | None, context: str) -> str:
    """The HTML report of a job.

    Raises:
        UsageError: The job does not exist.
        KubernetesError: The pod cannot be created, does not start, or fails.
    """
    cluster = open_cluster(ClusterOptions(namespace, kubeconfig, context))
    return report_page(cluster, name, partial(typer.echo, err=True), head_template)
