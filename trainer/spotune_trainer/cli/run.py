"""`spotune run`: train a job on this machine, or continue it. Imports the trainer only when called."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from spotune.job import FinetuneJob
    from spotune_trainer.bucket.state_mirror import StateMirror
    from spotune_trainer.job_directory.layout import JobDirectory
    from spotune_trainer.supervisor.console import View


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job to run.")],
    directory: Annotated[
        Path | None, typer.Option(help="Folder of the job's state and result; runs/<name> if not given.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes, in place of workers.count.")] = None,
    zero_stage: Annotated[
        int | None, typer.Option(min=0, max=3, help="ZeRO stage, in place of execution.zeroStage.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of steps, in place of training.maxSteps.")
    ] = None,
    output: Annotated[
        Literal["text", "json"], typer.Option(help="json: only the result on standard output, as one JSON object.")
    ] = "text",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print the duration of each part of the start-up.")
    ] = False,
    bucket: Annotated[
        str | None,
        typer.Option(
            help="s3://bucket/prefix, gs:// or az://: keeps the run, in place of storage.bucket; the folder is a copy.",
            metavar="URL",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of /progress, /metrics and /healthz; 0: any free port.")
    ] = 0,
) -> None:
    """Train on this machine with the same trainer and supervisor as in a cluster. The same command continues the run.

    Example: spotune run job.yaml --directory runs/my-job

    With a bucket, any machine continues the run, with or without the folder: spotune run job.yaml --bucket s3://b/my-job
    """
    from rich.console import Console

    from spotune.errors import JobError
    from spotune.job_file.deadlines import deadline_problems
    from spotune_trainer import files
    from spotune_trainer.bucket.state_mirror import mirrored
    from spotune_trainer.job_directory.job import put_job
    from spotune_trainer.job_directory.layout import JobDirectory
    from spotune_trainer.job_directory.lock import locked
    from spotune_trainer.supervisor.preflight.admission import check_directory, read_job, refuse_missing_gpus
    from spotune_trainer.supervisor.preflight.bucket import open_storage, storage_url
    from spotune_trainer.supervisor.preflight.checks import refuse_insufficient_space

    changes = {
        "spec.workers.count": workers,
        "spec.execution.zeroStage": zero_stage,
        "spec.training.maxSteps": max_steps,
    }
    requested = read_job(job, {path: value for path, value in changes.items() if value is not None})
    refuse_missing_gpus(requested)
    run_directory = JobDirectory((directory or Path("runs") / requested.metadata.name).absolute())
    storage = open_storage(storage_url(requested, bucket), run_directory)
    check_directory(run_directory, requested)
    if not run_directory.job.exists():  # a started run continues, even if the disk was filled or its deadline passed
        if problems := deadline_problems(requested, time.time()):
            raise JobError(problems=problems)
        refuse_insufficient_space(run_directory, requested)
    progress = Console(stderr=True) if output == "json" else Console()
    log = partial(progress.print, soft_wrap=True, highlight=False, markup=False)
    with locked(run_directory), mirrored(storage, run_directory, log) as mirror:
        put_job(run_directory, requested)
        # A supervisor that was killed just after training has left supervisor.json, and perhaps its Ray head.
        if not run_directory.result.exists() or run_directory.supervisor.exists():
            _train(run_directory, requested, progress, mirror, port=port, verbose=verbose)
    if requested.spec.serving is not None:
        hint = f"spec.serving is for clusters. On this machine, serve the model: spotune serve {run_directory.root}"
        log(hint)
    result = {
        **(files.read_json(run_directory.result) or {}),
        "export": str(run_directory.export),
    }  # not of another machine
    _show(result, requested.metadata.name, progress, as_json=output == "json")


def _train(
    run_directory: JobDirectory,
    job: FinetuneJob,
    console: Console,
    mirror: StateMirror | None,
    *,
    port: int,
    verbose: bool,
) -> None:
    from spotune_trainer.supervisor.http_server import ProgressServer
    from spotune_trainer.supervisor.ray_head.local import LocalRay
    from spotune_trainer.supervisor.supervisor import Supervisor

    workers = job.spec.workers
    gpus, starts_agent = workers.gpus > 0, not job.spec.training.has_user_code
    head = LocalRay(run_directory.root, workers.world_size, gpus=gpus, starts_agent=starts_agent, starts_driver=True)
    view = _view(job.metadata.name, console)
    supervisor = Supervisor(run_directory, lambda: job.spec.retry, head, view, verbose=verbose, mirror=mirror)
    with ProgressServer(run_directory, supervisor.health_problem, port=port) as server:
        supervisor.run(server.url)


def _view(name: str, console: Console) -> View:
    from rich.text import Text

    from spotune_trainer.supervisor.console import LiveView, PlainView

    if console.is_terminal:
        return LiveView(console, name)
    return PlainView(lambda line: console.print(Text(line), soft_wrap=True, highlight=False))


def _show(result: dict[str, Any], name: str, console: Console, *, as_json: bool) -> None:
    import json

    from spotune_trainer.supervisor.console import summary

    if as_json:
        typer.echo(json.dumps(result))
    else:
        console.print(summary(name, result))
