"""`spotune checkpoint`: see, verify and export what a run has committed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from spotune.errors import JobError, UsageError
from spotune_trainer import files
from spotune_trainer.checkpoint.catalogue import Entry, State, choose, list_entries
from spotune_trainer.layout import JobDirectory

checkpoint = typer.Typer(no_args_is_help=True, help="See, verify and export the checkpoints of a run.")

_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run.")]
_Step = Annotated[int | None, typer.Option(min=0, help="Only the checkpoint after this optimizer step.")]
_Output = Annotated[Literal["text", "json"], typer.Option(help="How the result is printed.")]
_STYLES = {State.WHOLE: "green", State.DAMAGED: "red"}


@checkpoint.command("ls")
def list_command(directory: _Directory, output: _Output = "text") -> None:
    """List the checkpoints of a run, oldest first.

    Example: spotune checkpoint ls runs/text-to-sql
    """
    _print(list_entries(JobDirectory(directory)), output)


@checkpoint.command("verify")
def verify_command(directory: _Directory, step: _Step = None, output: _Output = "text") -> None:
    """Read every committed checkpoint and compare it with its checksums; exit code 20 if one is damaged.

    Example: spotune checkpoint verify runs/text-to-sql
    """
    entries = [entry for entry in list_entries(JobDirectory(directory)) if step in (None, entry.name.step)]
    if not entries:
        raise UsageError(f"{directory} has no checkpoint{'' if step is None else f' of step {step}'}.")
    verified = [_verify(entry) for entry in entries]
    _print(verified, output)
    damaged = [entry for entry in verified if entry.state is State.DAMAGED]
    if damaged:
        found = "; ".join(f"{entry.name}: {entry.reason}" for entry in damaged)
        raise JobError(
            f"{len(damaged)} of {len(verified)} checkpoints damaged: {found}. A run goes on from the others."
        )


@checkpoint.command("export")
def export_command(
    directory: _Directory,
    step: _Step = None,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: export-step-N in the run's directory.")
    ] = None,
    output: _Output = "text",
) -> None:
    """Write the model of a checkpoint, by default the newest, as a directory that transformers loads.

    Example: spotune checkpoint export runs/text-to-sql --step 200
    """
    run = JobDirectory(directory)
    chosen = choose(list_entries(run), step)
    from spotune.job import FinetuneJob
    from spotune_trainer.checkpoint.reader import CorruptCheckpointError, read_parameters, verify
    from spotune_trainer.export import export_model

    try:
        verify(chosen)
        parameters = read_parameters(chosen)
    except CorruptCheckpointError as error:
        raise JobError(f"{error}. Name another with --step.") from error
    job = FinetuneJob.model_validate(files.read_json(run.job))
    destination = to or run.root / f"export-step-{chosen.name.step:08d}"
    sha256 = export_model(parameters, job, destination, _figures(run, chosen.name.step))
    if output == "json":
        typer.echo(json.dumps({"checkpoint": str(chosen.name), "export": str(destination), "exportSha256": sha256}))
    else:
        typer.echo(f"{chosen.name} -> {destination}\nTry it: spotune predict {destination} QUESTION")


def _verify(entry: Entry) -> Entry:
    from spotune_trainer.checkpoint.reader import CorruptCheckpointError, verify

    if entry.checkpoint is None:
        return entry
    try:
        verify(entry.checkpoint)
    except CorruptCheckpointError as error:
        return entry.damaged(error.reason)
    return entry


def _figures(run: JobDirectory, step: int) -> dict[str, Any]:
    """What is known of the model after a step: its last evaluation, for the model card."""
    names = {"loss": "evalLoss", "exactMatch": "exactMatch", "executionAccuracy": "executionAccuracy"}
    evaluated: Mapping[str, Any] = {}
    for record in files.read_lines(run.ledger):
        if record["event"] == "evaluated" and record.get("step") == step:
            evaluated = record
    return {"steps": step, **{name: evaluated.get(field) for field, name in names.items()}}


def _print(entries: Sequence[Entry], output: str) -> None:
    if output == "json":
        typer.echo(json.dumps({"checkpoints": [entry.as_json() for entry in entries]}, indent=2))
        return
    if not entries:
        typer.echo("no checkpoints yet")
        return
    table = Table("step", "generation", "committed", "workers", "ZeRO", "size", "state", box=None)
    for entry in entries:
        style = _STYLES.get(entry.state, "dim")
        text = f"{entry.state}: {entry.reason}" if entry.reason else entry.state.value
        table.add_row(str(entry.name.step), str(entry.name.generation), *_manifest_cells(entry), Text(text, style))
    Console().print(table)


def _manifest_cells(entry: Entry) -> tuple[str, str, str, str]:
    if entry.checkpoint is None:
        return ("", "", "", "")
    manifest = entry.checkpoint.manifest
    committed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    return committed, str(manifest.world_size), str(manifest.zero_stage), decimal(entry.checkpoint.bytes)
