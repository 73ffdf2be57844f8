"""`spotune run`: train a job on this machine, or go on where it was. Light at import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from spotune.job import FinetuneJob
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
        int | None, typer.Option(min=1, help="Stop after so many steps, in place of training.maxSteps.")
    ] = None,
    output: Annotated[
        Literal["text", "json"], typer.Option(help="json: only the result on standard output, as one JSON object.")
    ] = "text",
    verbose: Annotated[bool, typer.Option("--verbose", help="Also say where the time of the start-up went.")] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of /progress, /metrics and /healthz; 0: any free one.")
    ] = 0,
) -> None:
    """Train on this machine, with the trainer and the supervisor of a cluster; the same command again goes on.

    Example: spotune run job.yaml --directory runs/my-job
    """
    from rich.console import Console

    from spotune_trainer import files
    from spotune_trainer.job_directory.job import check_directory, put_job, read_job, refuse_missing_gpus
    from spotune_trainer.job_directory.layout import JobDirectory
    from spotune_trainer.job_directory.lock import locked
    from spotune_trainer.supervisor.preflight.checks import refuse_missing_space

    changes = {
        "spec.workers.count": workers,
        "spec.execution.zeroStage": zero_stage,
        "spec.training.maxSteps": max_steps,
    }
    wanted = read_job(job, {path: value for path, value in changes.items() if value is not None})
    refuse_missing_gpus(wanted)
    place = JobDirectory((directory or Path("runs") / wanted.metadata.name).absolute())
    check_directory(place, wanted)
    if not place.job.exists():  # a run that has begun goes on, whatever has filled the disk since
        refuse_missing_space(place, wanted)
    progress = Console(stderr=True) if output == "json" else Console()
    with locked(place):
        put_job(place, wanted)
        if not place.result.exists() or place.supervisor.exists():  # whose supervisor was killed as it was trained
            _train(place, wanted, progress, port=port, verbose=verbose)
    _show(files.read_json(place.result) or {}, wanted.metadata.name, progress, as_json=output == "json")


def _train(place: JobDirectory, job: FinetuneJob, console: Console, *, port: int, verbose: bool) -> None:
    from spotune_trainer.supervisor.http_server import ProgressServer
    from spotune_trainer.supervisor.ray_head.local import LocalRay
    from spotune_trainer.supervisor.supervisor import Supervisor

    workers = job.spec.workers
    head = LocalRay(place.root, workers.world_size, gpus=workers.gpus > 0)
    view = _view(job.metadata.name, console)
    supervisor = Supervisor(place, lambda: job.spec.retry, head, view, verbose=verbose)
    with ProgressServer(place, supervisor.sickness, port=port) as server:
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
