"""`spotune plan JOB.yaml`: what a job needs by number of workers, without torch, a GPU or a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from spotune.cli.plan_table import print_plan
from spotune.errors import JobError, UsageError
from spotune.job import FinetuneJob
from spotune.job_file.load import load_job, resolve_paths
from spotune.plan.config_reader import read_architecture
from spotune.plan.devices import device_memory_bytes, machine_memory_bytes, parse_bytes
from spotune.plan.job_plan import Assumptions, Device, plan_job
from spotune.plan.known_models import PUBLISHED, published_config
from spotune.units.durations import Duration

DEFAULT_DEVICE = "a100-80gb"


def plan(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job.")],
    workers: Annotated[
        str, typer.Option(help="Numbers of workers (one per GPU), such as 1,2,4. Default: the job's own.")
    ] = "",
    device: Annotated[str, typer.Option(help=f"GPU, such as a100-80gb, h200 or l4. Default: {DEFAULT_DEVICE}.")] = "",
    device_memory: Annotated[str, typer.Option(help="Memory of one GPU or CPU worker, such as 80GB.")] = "",
    config: Annotated[Path | None, typer.Option(help="config.json of the model.")] = None,
    preemption_every: Annotated[
        str, typer.Option(help="Assumed mean time until one worker's node is taken away.")
    ] = "6h",
    storage_bandwidth: Annotated[str, typer.Option(help="Assumed bytes per second to the volume.")] = "500MB",
    step_seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Measured time of a step; the plan then counts in steps, too.")
    ] = None,
    output: Annotated[Literal["text", "json"], typer.Option(help="How the result is printed.")] = "text",
) -> None:
    """Print memory, ZeRO stage, micro-batch size and checkpoint interval by number of workers.

    Example: spotune plan job.yaml --workers 1,2,4 --device h200
    """
    job = resolve_paths(load_job(job_file), job_file.resolve().parent)
    worker_counts = _worker_counts(workers, job)
    assumptions = Assumptions(
        mean_seconds_to_preemption=_seconds(preemption_every, "--preemption-every"),
        storage_bytes_per_second=parse_bytes(storage_bandwidth, "--storage-bandwidth"),
        step_seconds=step_seconds,
    )
    made = plan_job(
        job,
        read_architecture(_model_config(job, config)),
        {count: _device(job, device, device_memory, count) for count in worker_counts},
        assumptions,
    )
    if output == "json":
        typer.echo(json.dumps(made.as_json(), indent=2))
    else:
        print_plan(made, Console())
    if not made.possible:
        raise JobError(made.workers[-1].problem)


def _worker_counts(text: str, job: FinetuneJob) -> list[int]:
    """The numbers of workers to plan for: as asked, else the fewest and the most that the job runs with."""
    if not text:
        return sorted({job.spec.workers.min_world_size, job.spec.workers.world_size})
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise UsageError(f"--workers {text}: expected whole numbers from 1, separated by commas, such as 1,2,4.")
    return sorted(set(counts))


def _seconds(text: str, option: str) -> float:
    try:
        seconds = Duration(text).seconds
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
    if seconds <= 0:
        raise UsageError(f"{option} {text}: must be longer than nothing.")
    return seconds


def _device(job: FinetuneJob, name: str, memory: str, world_size: int) -> Device:
    """The device of one worker; CPU workers share this machine unless their memory is given."""
    if name and memory:
        raise UsageError("--device and --device-memory: give one of them.")
    if memory:
        return Device(f"{memory} per worker", parse_bytes(memory, "--device-memory"))
    if job.spec.workers.gpus == 0:
        if name:
            raise UsageError(
                f"--device {name}: the job's workers have no GPUs (workers.gpus: 0); give --device-memory."
            )
        return Device("this machine's memory, shared by the workers", machine_memory_bytes() // world_size)
    chosen = name or DEFAULT_DEVICE
    return Device(chosen if name else f"{chosen}, assumed (--device)", device_memory_bytes(chosen))


def _model_config(job: FinetuneJob, file: Path | None) -> dict[str, Any]:
    """The model's `config.json`: the given file, the one in the model's folder, or a well-known model's."""
    source = job.spec.model.source
    if file is None and "://" not in source:
        file = Path(source) / "config.json"
        if not file.is_file():
            raise JobError(
                f"model.source: {source} has no config.json, which the plan needs. Check the path, or give the file "
                "with --config FILE."
            )
    if file is not None:
        return _read_config(file)
    published = published_config(source)
    if published is None:
        raise JobError(
            f"model.source: the plan works without a network and does not know the size of {source}. Download the "
            f"model's config.json and give it with --config FILE. ({len(PUBLISHED)} well-known models need no file, "
            "such as hf://google-t5/t5-3b and hf://meta-llama/Llama-3.1-8B.)"
        )
    return dict(published)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {file}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise JobError(f"{file}: not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise JobError(f"{file}: expected a JSON object, as transformers writes it.")
    return config
