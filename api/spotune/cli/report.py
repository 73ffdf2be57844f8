"""`spotune report`: an HTML page about a job, from its directory or from a cluster."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from spotune.cli.plugins import CommandSource

_GROUP = "spotune.reports"
"""Entry points that render a report: ``directory`` of the trainer, ``cluster`` of the operator."""


def report(
    job: Annotated[str, typer.Argument(metavar="DIR|NAME", help="Directory of a run, or name of a job in a cluster.")],
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file. Default: NAME.html in the current directory.")
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace of the job. Default: the context's.")
    ] = "",
    kubeconfig: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Kubeconfig. Default: $KUBECONFIG or ~/.kube/config.")
    ] = None,
    context: Annotated[
        str, typer.Option(metavar="NAME", help="Context of the kubeconfig. Default: the current one.")
    ] = "",
) -> None:
    """Write an HTML report of a job: curves, worker groups and why they ended, goodput, plan and spec.

    The page is one self-contained file. It can be written while the job runs. In a cluster, a temporary pod reads the
    job's volume.

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
