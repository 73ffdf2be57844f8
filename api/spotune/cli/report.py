"""`spotune report`: an HTML page about a job, from its directory or from a cluster; and checks of files for pages."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from spotune.cli.plugins import CommandSource
from spotune.errors import UsageError

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
    is_directory = Path(job).is_dir()
    name = Path(job).resolve().name if is_directory else job.rpartition("/")[2]
    target = writable_file(file or Path(f"{name}.html"), "--file")
    if is_directory:
        page: str = _source("directory").load()(Path(job))
    else:
        page = _source("cluster").load()(job, namespace, kubeconfig, context)
    target.write_text(page, encoding="utf-8")
    typer.echo(f"{target} ({len(page.encode()) / 1000:,.0f} kB)")


def writable_file(path: Path, option: str) -> Path:
    """The path of a file that a command can write: checked before its work, which may take minutes.

    Folders that it is in are created.

    Args:
        path: The path as the user gave it.
        option: The option with the path, for messages.

    Raises:
        UsageError: No file can be written there.
    """
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path}: the folder {path.parent} cannot be created: {error.strerror}") from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: you may not write there; choose another file")
    return path


def _source(name: str) -> CommandSource:
    (found,) = entry_points(group=_GROUP, name=name)
    return CommandSource("report", found.value)
