"""`spotune checkpoint`: list, verify, export and convert the checkpoints of a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from spotune.errors import InfrastructureError, JobError, UsageError
from spotune.formatting import scores_of
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.catalogue import CatalogueEntry, CheckpointState, list_entries, select_checkpoint
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.job_directory.layout import JobDirectory

checkpoint = typer.Typer(no_args_is_help=True, help="List, verify, export and convert the checkpoints of a run.")

_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run.")]
_Step = Annotated[int | None, typer.Option(min=0, help="Only the checkpoint after this optimizer step.")]
_Output = Annotated[Literal["text", "json"], typer.Option(help="How the result is printed.")]
_STYLES = {CheckpointState.WHOLE: "green", CheckpointState.DAMAGED: "red"}


@checkpoint.command("ls")
def list_command(directory: _Directory, output: _Output = "text") -> None:
    """List the checkpoints of a run, oldest first.

    Example: spotune checkpoint ls runs/text-to-sql
    """
    _print(list_entries(JobDirectory(directory)), output)


@checkpoint.command("verify")
def verify_command(directory: _Directory, step: _Step = None, output: _Output = "text") -> None:
    """Compare each committed checkpoint with its checksums; exit code 20 if one is damaged.

    Example: spotune checkpoint verify runs/text-to-sql
    """
    entries = [entry for entry in list_entries(JobDirectory(directory)) if step in (None, entry.name.step)]
    if not entries:
        raise UsageError(f"{directory} has no checkpoint{'' if step is None else f' of step {step}'}.")
    verified = [_verify(entry) for entry in entries]
    _print(verified, output)
    damaged = [entry for entry in verified if entry.state is CheckpointState.DAMAGED]
    if damaged:
        found = "; ".join(f"{entry.name}: {entry.reason}" for entry in damaged)
        raise JobError(
            f"{len(damaged)} of {len(verified)} checkpoints are damaged: {found}. A run resumes from the others."
        )


@checkpoint.command("export")
def export_command(
    directory: _Directory,
    step: _Step = None,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: export-step-N in the run's directory.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The moving average of the weights (training.emaDecay).")] = False,
    output: _Output = "text",
) -> None:
    """Write the model of a checkpoint, by default the newest, as a directory that transformers can load.

    Example: spotune checkpoint export runs/text-to-sql --step 200
    """
    run = JobDirectory(directory)
    chosen = select_checkpoint(list_entries(run), step)
    from spotune_trainer.checkpoint.reader import CorruptCheckpointError, read_ema, read_trained_weights, verify
    from spotune_trainer.export.huggingface import export_model

    job = FinetuneJob.model_validate(files.read_json(run.job))
    if job.spec.training.has_user_code:
        _export_files(run, chosen, to, as_json=output == "json")
        return
    if ema and not job.spec.training.ema_decay:
        raise UsageError("--ema needs a run with training.emaDecay: omit it.")
    try:
        _fetch(chosen)
        verify(chosen)
        parameters = read_ema(chosen) if ema else read_trained_weights(chosen, job.spec.training)
    except CorruptCheckpointError as error:
        raise JobError(f"{error}. Give another step with --step.") from error
    trained = chosen.name.step
    destination = to or run.root / f"export-{'ema-' if ema else ''}step-{trained:08d}"
    results = {"steps": trained} if ema else _evaluation_results(run, trained)
    sha256 = export_model(parameters, job, destination, results, step=trained)
    if output == "json":
        typer.echo(json.dumps({"checkpoint": str(chosen.name), "export": str(destination), "exportSha256": sha256}))
    else:
        typer.echo(f"{chosen.name} -> {destination}")
        if job.spec.model_kind not in ("reward", "embedding"):
            typer.echo(f"Try it: spotune predict {destination} QUESTION")


def _export_files(run: JobDirectory, chosen: Checkpoint, to: Path | None, *, as_json: bool) -> None:
    """Copy the files of a training function's checkpoint, as the function has saved them."""
    from spotune_trainer.checkpoint.reader import CorruptCheckpointError, verify
    from spotune_trainer.training_functions.export import export_files

    try:
        _fetch(chosen)
        verify(chosen)
    except CorruptCheckpointError as error:
        raise JobError(f"{error}. Give another step with --step.") from error
    destination = to or run.root / f"export-step-{chosen.name.step:08d}"
    sha256 = export_files(chosen, destination)
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(chosen.name), "export": str(destination), "exportSha256": sha256}))
    else:
        typer.echo(f"{chosen.name} -> {destination}")


@checkpoint.command("convert")
def convert_command(
    directory: _Directory,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a universal checkpoint of DeepSpeed here.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Start the run from this universal checkpoint.")
    ] = None,
    job: Annotated[
        Path | None, typer.Option(metavar="JOB.yaml", help="With --from: the job, if DIR has none yet.")
    ] = None,
    step: _Step = None,
    output: _Output = "text",
) -> None:
    """Write a checkpoint, by default the newest, in DeepSpeed's universal format, or start a run from one.

    For an engine whose configuration has checkpoint: {load_universal: true}, at ZeRO stage 1, 2 or 3:

    spotune checkpoint convert runs/text-to-sql --to universal/step-200 --step 200

    Start a run from the output of deepspeed.checkpoint.ds_to_universal; spotune run continues after its last step:

    spotune checkpoint convert runs/continued --from universal/global_step200 --job job.yaml
    """
    if (to is None) == (source is None):
        raise UsageError("give either --to, a folder to write, or --from, a folder to read.")
    if source is not None and step is not None:
        raise UsageError("--step selects a checkpoint of this run, but --from reads another folder: omit --step.")
    if to is not None and job is not None:
        raise UsageError("--job needs --from: a run with checkpoints has a job already.")
    try:
        if to is not None:
            result = _to_universal(JobDirectory(directory), step, to)
        else:
            assert source is not None
            result = _from_universal(directory, source, job)
    except OSError as error:
        raise InfrastructureError(
            f"the conversion failed and wrote nothing: {error}. Run the command again."
        ) from error
    typer.echo(json.dumps(result) if output == "json" else result["message"])


def _to_universal(run: JobDirectory, step: int | None, output: Path) -> dict[str, Any]:
    from spotune_trainer.checkpoint.reader import CorruptCheckpointError, verify
    from spotune_trainer.cli.byte_progress import byte_progress
    from spotune_trainer.job_directory.job import job_of

    chosen = select_checkpoint(list_entries(run), step)
    output = output.absolute()
    if output.exists():
        raise UsageError(f"{output} exists: give a new folder, or remove this one.")
    with redirect_stdout(sys.stderr):  # DeepSpeed keeps logging to the stream that it finds at import
        from spotune_trainer.export.universal import check_has_moments, write_universal
    job = job_of(run)
    if job is not None:
        _refuse_user_code(job)
        check_has_moments(job)
    try:
        _fetch(chosen)
        verify(chosen)
        with byte_progress("Converting", Console(stderr=True)) as report:
            write_universal(chosen, output, report)
    except CorruptCheckpointError as error:
        raise JobError(f"{error}. Give another step with --step.") from error
    load = f'engine.load_checkpoint("{output.parent}", tag="{output.name}")'
    return {
        "checkpoint": str(chosen.name),
        "universal": str(output),
        "message": f"{chosen.name} -> {output}\nLoad it: {load} with checkpoint: {{load_universal: true}}",
    }


def _refuse_user_code(job: FinetuneJob) -> None:
    """Raise UsageError for a job with a training function or command, which saves what it likes."""
    if job.spec.training.has_user_code:
        raise UsageError(
            "a job with training.function or training.command has checkpoints of its own format: use spotune "
            "checkpoint export."
        )


def _from_universal(directory: Path, source: Path, job_file: Path | None) -> dict[str, Any]:
    from spotune_trainer.cli.byte_progress import byte_progress
    from spotune_trainer.job_directory.job import job_of, put_job
    from spotune_trainer.job_directory.lock import locked
    from spotune_trainer.supervisor.preflight.admission import check_directory, read_job

    run = JobDirectory(directory.absolute())
    job = read_job(job_file, {}) if job_file else job_of(run)
    if job is None:
        raise UsageError(f"{directory} has no job yet: give its file with --job.")
    _refuse_user_code(job)
    check_directory(run, job)
    with redirect_stdout(sys.stderr):  # DeepSpeed keeps logging to the stream that it finds at import
        from spotune_trainer.export.import_universal import import_universal_checkpoint
    with locked(run), byte_progress("Converting", Console(stderr=True)) as report:
        put_job(run, job)
        manifest = import_universal_checkpoint(run, job, source, report)
    name = str(CheckpointName(manifest.step, manifest.generation))
    return {
        "checkpoint": name,
        "universal": str(source),
        "message": f"{source} -> {run.checkpoints / name}\nspotune run continues after step {manifest.step}",
    }


def _fetch(chosen: Checkpoint) -> None:
    """Download the files of a checkpoint, if a bucket keeps the run.

    Raises:
        CorruptCheckpointError: the bucket has other files than were committed.
        InfrastructureError: the bucket cannot be read.
    """
    from spotune_trainer.bucket.client import BucketError
    from spotune_trainer.checkpoint.reader import fetch

    try:
        fetch(chosen)
    except BucketError as error:
        raise InfrastructureError(str(error)) from error


def _verify(entry: CatalogueEntry) -> CatalogueEntry:
    from spotune_trainer.checkpoint.reader import CorruptCheckpointError, verify

    if entry.checkpoint is None:
        return entry
    try:
        _fetch(entry.checkpoint)
        verify(entry.checkpoint)
    except CorruptCheckpointError as error:
        return entry.as_damaged(error.reason)
    return entry


def _evaluation_results(run: JobDirectory, step: int) -> dict[str, Any]:
    """Loss and scores of the evaluation after a step, for the model card; None and empty without one."""
    evaluated: Mapping[str, Any] = {}
    of_tasks: Mapping[str, float] = {}
    for record in files.read_lines(run.ledger):
        if record["event"] == "evaluated" and record.get("step") == step:
            evaluated = record
        elif record["event"] == "harness" and record.get("step") == step:
            of_tasks = record["scores"]
    return {"steps": step, "evalLoss": evaluated.get("loss"), "scores": {**scores_of(evaluated), **of_tasks}}


def _print(entries: Sequence[CatalogueEntry], output: str) -> None:
    if output == "json":
        typer.echo(json.dumps({"checkpoints": [entry.as_json() for entry in entries]}, indent=2))
        return
    if not entries:
        typer.echo("no checkpoints yet")
        return
    table = Table("step", "generation", "committed", "workers", "ZeRO", "size", "state", box=None)
    for entry in entries:
        style = _STYLES.get(entry.state, "dim")
        state = f"{entry.state}, best" if entry.is_best else entry.state.value
        text = f"{state}: {entry.reason}" if entry.reason else state
        table.add_row(str(entry.name.step), str(entry.name.generation), *_manifest_cells(entry), Text(text, style))
    Console().print(table)


def _manifest_cells(entry: CatalogueEntry) -> tuple[str, str, str, str]:
    if entry.checkpoint is None:
        return ("", "", "", "")
    manifest = entry.checkpoint.manifest
    committed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    return committed, str(manifest.world_size), str(manifest.zero_stage), decimal(entry.checkpoint.bytes)
