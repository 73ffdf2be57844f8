"""The typer command `spotune sweep`. It imports the Kubernetes client only when it runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from spotune.cli.report import writable_file
from spotune_operator.cli.options import Context, Kubeconfig, Namespace, Output

_WIDE: Final = 240


def sweep(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the sweep.")],
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page that compares the trials to this HTML file.")
    ] = None,
    output: Output = "text",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Show the trials of a FinetuneSweep, the best first: state, objective, parameters, and GPU time.

    With --report it also writes them to an HTML page, with a chart of the objective over the steps of each trial.

    Examples: spotune sweep t5-search; spotune sweep t5-search --report search.html
    """
    from rich.console import Console

    from spotune.crd.definition import FINETUNE_SWEEPS
    from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster
    from spotune_client.cluster.resources import get_object
    from spotune_client.sweeps.page import page
    from spotune_client.sweeps.trials import as_json
    from spotune_operator.cli.sweeps.table import table

    if report is not None:
        writable_file(report, "--report")
    cluster = open_cluster(ClusterOptions(namespace, kubeconfig, context))
    found = get_object(cluster, FINETUNE_SWEEPS, name)
    if report is not None:
        report.write_text(page(found, time.time()), encoding="utf-8")
    if output == "json":
        typer.echo(json.dumps(as_json(found), indent=2))
    else:
        (Console() if sys.stdout.isatty() else Console(width=_WIDE)).print(table(found, time.time()))
        if report is not None:
            typer.echo(f"\n{report} ({report.stat().st_size / 1000:,.0f} kB)")
