"""`spotune report`: a job as one HTML page, from its directory or from the cluster."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from spotune.cli.plugins import CommandSource

_GROUP = "spotune.reports"
"""Entry points of what can tell a report: ``directory`` of the trainer, ``cluster`` of the operator."""


def report(
    job: Annotated[str, typer.Argument(metavar="DIR|NAME", help="The directory of a run, or a job in a cluster.")],
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to; by default NAME.html here.")] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", metavar="NAME", help="Of the job; by default that of the context.")
    ] = "",
    kubeconfig: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of $KUBECONFIG and ~/.kube/config.")
    ] = None,
    context: Annotated[
        str, typer.Option(metavar="NAME", help="Context of the kubeconfig; by default its current one.")
    ] = "",
) -> None:
    """Write a page about a job: curves, worker groups and why they ended, where the time went, its plan and its spec.

    The page is one file with nothing outside of it. It may be written while the job runs; in a cluster a short-lived
    pod reads the job's volume.

    Examples: spotune report runs/text-to-sql; spotune report t5-sql --namespace team --file t5.html
    """
    if Path(job).is_dir():
        page: str = _source("directory").load()(Path(job))
        name = Path(job).resolve().name
    else:
        page = _source("cluster").load()(job, namespace, kubeconfig, context)
        name = job
    target = file or Path(f"{name}.html")
    target.write_text(page, encoding="utf-8")
    typer.echo(f"{target} ({len(page.encode()) / 1000:,.0f} kB)")


def _source(name: str) -> CommandSource:
    (found,) = entry_points(group=_GROUP, name=name)
    return CommandSource("report", found.value)
