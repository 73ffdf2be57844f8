"""The typer command `spotune fleet`: what the jobs of each team have used. It imports the client only when it runs."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from spotune.cli.report import writable_file
from spotune.custom_resource.object_names import TEAM_LABEL
from spotune.errors import UsageError
from spotune_operator.cli.options import Context, Kubeconfig, Namespace

if TYPE_CHECKING:
    from spotune_client.fleet.summary import Fleet

_WIDE: Final = 240


def fleet(
    by: Annotated[
        Literal["team", "namespace"],
        typer.Option(help="team: the value of a label of the jobs, or without it their namespace."),
    ] = "team",
    team_label: Annotated[str, typer.Option(metavar="KEY", help="The label with the team.")] = TEAM_LABEL,
    all_namespaces: Annotated[
        bool,
        typer.Option("--all-namespaces", "-A", help="Count the jobs of all namespaces; not with --namespace."),
    ] = False,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this file instead of standard output.")
    ] = None,
    output: Annotated[Literal["text", "json", "html"], typer.Option(help="Output format.")] = "text",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Show GPU hours, cost, goodput and waste of all FinetuneJobs by team.

    Counted are the FinetuneJobs that exist now, with those of sweeps. Jobs that were deleted and ModelServices are not:
    the status of a service has no GPU hours and no cost. Waste is an upper bound: GPU hours x (1 - goodput).

    Examples: spotune fleet --all-namespaces; spotune fleet -A --output html --file fleet.html
    """
    if namespace and all_namespaces:
        raise UsageError("--all-namespaces counts the jobs of all namespaces: remove --namespace")
    if file is not None:
        writable_file(file, "--file")
    from spotune_client.cluster.jobs import list_jobs
    from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster
    from spotune_client.fleet.page import page
    from spotune_client.fleet.summary import fleet_of

    cluster = open_cluster(ClusterOptions(namespace, kubeconfig, context))
    found = fleet_of(list_jobs(cluster, everywhere=all_namespaces), by, team_label)
    scope = "all namespaces" if all_namespaces else f"namespace {cluster.namespace}"
    if output == "html":
        text = page(found, scope, time.time())
    elif output == "json":
        text = json.dumps(found.as_json(), indent=2) + "\n"
    elif not found.teams:
        text = f"There are no FinetuneJobs in {scope}.\n"
    else:
        text = _table(found, in_terminal=file is None and sys.stdout.isatty())
    if file is None:
        typer.echo(text, nl=False)
    else:
        file.write_text(text, encoding="utf-8")
        typer.echo(f"{file} ({file.stat().st_size / 1000:,.1f} kB)")


def _table(found: Fleet, *, in_terminal: bool) -> str:
    """The table with a row for each team, and one for all."""
    from rich.console import Console
    from rich.table import Table

    from spotune_client.fleet.summary import COLUMNS, NOT_COUNTED, cells

    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in COLUMNS:
        grid.add_column(column.upper(), no_wrap=True, justify="left" if column == COLUMNS[0] else "right")
    for usage in found.teams:
        grid.add_row(*cells(usage))
    if len(found.teams) > 1:
        grid.add_row(*cells(found.total, "all"), style="bold")
    written = io.StringIO()
    console = Console(file=written, force_terminal=in_terminal, width=None if in_terminal else _WIDE)
    console.print(grid)
    left_out = f"\nNot counted: {', '.join(NOT_COUNTED)}.\n"
    return written.getvalue() + left_out + (f"{found.note}.\n" if found.note else "")
