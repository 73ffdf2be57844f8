"""`spotune report` for a job in a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import typer

from spotune.errors import UsageError
from spotune_client.cluster.jobs import get_job, status_of
from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster
from spotune_client.cluster.resources import job_name
from spotune_client.report import report_page
from spotune_operator.cli.head_template import head_template
from spotune_operator.cli.status import cost_line


def report_of_job(name: str, namespace: str, kubeconfig: Path | None, context: str) -> str:
    """The HTML report of a job.

    Raises:
        UsageError: The job does not exist.
        KubernetesError: The pod cannot be created, does not start, or fails.
    """
    try:
        name = job_name(name, "report")
    except UsageError as error:
        raise UsageError(f"there is no folder {name}, and {error}") from error
    cluster = open_cluster(ClusterOptions(namespace, kubeconfig, context))
    page = report_page(cluster, name, partial(typer.echo, err=True), head_template)
    return with_cost(page, status_of(get_job(cluster, name)))


def with_cost(page: str, status: Mapping[str, Any]) -> str:
    """The page with money spent and saved among its figures, or why that is not known.

    The trainer makes the page from its files, which have no prices. Its image may be older than this command, so the
    figures are added here.
    """
    cost, text = status.get("cost") or {}, cost_line(status)
    amounts = [(name, cost[name]) for name in ("spent", "saved") if cost.get(name) is not None]
    found = "".join(f"<div><dt>{name}</dt><dd>{value:.2f} {cost['currency']}</dd></div>" for name, value in amounts)
    remark = f'<p class="lead">Cost: {escape(text)}.</p>' if text else ""
    return page.replace("</dl>", f"{found}</dl>\n{remark}", 1) if remark else page
