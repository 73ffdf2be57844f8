"""`spotune plan JOB.yaml`: a job's memory, layout and speed by number of workers, without torch, GPU or network."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console

from spotune.cli.hub_cache import HUB_HINT, cached_config
from spotune.cli.plan_pools import print_pools
from spotune.cli.plan_table import print_plan
from spotune.deadline.odds import Odds, deadline_odds, print_odds, read_markets, switching_of
from spotune.deadline.terms import Switching, work_seconds
from spotune.errors import JobError, UsageError
from spotune.job import FinetuneJob, cheapest_first
from spotune.job_file.deadlines import refuse_past_deadline
from spotune.job_file.load import load_job, resolve_paths
from spotune.plan.config_reader import read_architecture
from spotune.plan.devices import (
    DEVICE_CAPABILITIES,
    device_memory_bytes,
    device_of_gpu_type,
    machine_memory_bytes,
    missing_capability,
    parse_bytes,
)
from spotune.plan.job.job_plan import Assumptions, Device, JobPlan, plan_job, workers_json
from spotune.plan.known_models import KNOWN_CONFIGS, known_config
from spotune.pools.plan import PoolPlan, plan_pools
from spotune.simulate.history import read_history
from spotune.simulate.measured import read_timings
from spotune.simulate.terms import Timings
from spotune.units.durations import Duration

DEFAULT_DEVICE = "a100-80gb"
DEFAULT_FP8_DEVICE = "h100-80gb"


def plan(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Job file.")],
    workers: Annotated[
        str,
        typer.Option(help="Numbers of workers (one per GPU), such as 1,2,4. Default: the job's minimum and maximum."),
    ] = "",
    device: Annotated[str, typer.Option(help=f"GPU, such as a100-80gb, h200 or l4. Default: {DEFAULT_DEVICE}.")] = "",
    device_memory: Annotated[str, typer.Option(help="Memory of one GPU or CPU worker, such as 80GB.")] = "",
    config: Annotated[Path | None, typer.Option(help="config.json of the model.")] = None,
    preemption_every: Annotated[str, typer.Option(help="Assumed mean time until one worker is preempted.")] = "6h",
    storage_bandwidth: Annotated[str, typer.Option(help="Assumed write speed of the volume, per second.")] = "500MB",
    step_seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Measured seconds per step, to show intervals in steps as well.")
    ] = None,
    documents_per_row: Annotated[
        float, typer.Option(min=1, help="Documents that are packed into a row, on average: for the step time.")
    ] = 1.0,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Trace of a spot market (seconds,nodes), for the odds of spec.deadline; repeatable."),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of a job on spot nodes: the nodes that it had, as a trace."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="With --trace: steps, if not training.maxSteps.")] = None,
    spot_price: Annotated[float | None, typer.Option(min=0, help="With --trace: price of a node per hour.")] = None,
    on_demand_price: Annotated[float | None, typer.Option(min=0, help="The same on demand.")] = None,
    on_demand_start: Annotated[
        str, typer.Option(help="With --trace: time from the request of on-demand nodes to the next step.")
    ] = "10m",
    output: Annotated[Literal["text", "json"], typer.Option(help="Output format.")] = "text",
) -> None:
    """Print memory, layout, estimated step time and checkpoint interval by number of workers, and by pool.

    Example: spotune plan job.yaml --workers 1,2,4 --device h200

    Example: spotune plan job.yaml --history runs/t5-sql --steps 40000

    Example: spotune plan job.yaml --trace zone-a.csv --trace zone-b.csv --step-seconds 2.5 --steps 40000
    """
    job = resolve_paths(load_job(job_file), job_file.resolve().parent)
    refuse_past_deadline(job, job_file, time.time())
    worker_counts = _worker_counts(workers)
    if documents_per_row > 1 and not job.spec.dataset.packing:
        raise UsageError("--documents-per-row: the job packs no documents into a row: set dataset.packing: true.")
    assumptions = Assumptions(
        mean_seconds_to_preemption=_seconds(preemption_every, "--preemption-every"),
        storage_bytes_per_second=parse_bytes(storage_bandwidth, "--storage-bandwidth"),
        step_seconds=step_seconds,
        documents_per_row=documents_per_row,
    )
    architecture = read_architecture(_model_config(job, config))

    def plan_for(counts: Sequence[int]) -> JobPlan:
        devices = {count: _device(job, device, device_memory, count) for count in counts}
        return plan_job(job, architecture, devices, assumptions)

    pools = plan_pools(
        job,
        lambda devices: plan_job(job, architecture, devices, assumptions),
        lambda gpu_type, processes: _device_of_pool(job, device, device_memory, processes, gpu_type),
    )
    start = _seconds(on_demand_start, "--on-demand-start")
    prices = (spot_price, on_demand_price)
    odds = _odds(job, trace or [], history, steps, step_seconds, start, prices) if trace or history else None
    job_plan = plan_for(worker_counts or _least_and_most(job, lambda count: plan_for([count]).feasible))
    if output == "json":
        found = {"deadline": [row.as_json() for row in odds.rows]} if odds is not None else {}
        if pools:
            found |= {"pools": [each.as_json(_pool_json(each, job_plan)) for each in pools]}
        typer.echo(json.dumps(job_plan.as_json() | found, indent=2))
    else:
        print_plan(job_plan, Console())
        print_pools(pools, Console())
        if odds is not None:
            print_odds(*odds, Console())
    if not job_plan.feasible:
        raise JobError(job_plan.workers[-1].problem)


class _DeadlineOdds(NamedTuple):
    """The odds of the deadline, and what they were computed from."""

    rows: list[Odds]
    work: float
    to_deadline: float
    switching: Switching


def _odds(
    job: FinetuneJob,
    traces: Sequence[Path],
    history: Path | None,
    steps: int | None,
    step_seconds: float | None,
    on_demand_start: float,
    prices: tuple[float | None, float | None],
) -> _DeadlineOdds:
    """The odds of the job's deadline if it began now, with all of its workers."""
    spec, now = job.spec, time.time()
    steps, workers = steps or spec.training.max_steps, spec.workers.count
    if spec.deadline is None:
        raise UsageError("--trace: the job has no spec.deadline, such as 36h, whose odds could be told.")
    times, markets = Timings(step={}), read_markets(traces)
    if history is not None:
        markets[f"history of {history.name}"] = read_history(history)
        times = read_timings(history, times, "--history")
    seconds = _by_node(times.step, spec.workers.gpus) if step_seconds is None else {workers: step_seconds}
    if steps is None or not seconds:
        missing = "--step-seconds" if not seconds else "--steps"
        raise UsageError(f"{missing}: is needed with --trace. A run tells both: spotune run JOB.yaml --max-steps 50.")
    switching = switching_of(times, on_demand_start)
    work = work_seconds(steps, seconds, workers)
    to_deadline = spec.deadline.at(now) - now
    rows = deadline_odds(markets, nodes=workers, work=work, to_deadline=to_deadline, switching=switching, prices=prices)
    return _DeadlineOdds(rows, work, to_deadline, switching)


def _by_node(step: Mapping[int, float], gpus: int) -> dict[int, float]:
    """Seconds per step by number of nodes, of measured ones by number of worker processes."""
    return {max(1, processes // max(1, gpus)): seconds for processes, seconds in step.items()}


def _least_and_most(job: FinetuneJob, fits: Callable[[int], bool]) -> list[int]:
    """The job's minimum and maximum of workers; with `workers.min: auto` the minimum is the smallest that fits."""
    workers = job.spec.workers
    least, most = workers.min_world_size, workers.world_size
    if workers.min == "auto":
        least = next(filter(fits, workers.world_sizes[:-1]), most)
    return sorted({least, most})


def _worker_counts(text: str) -> list[int]:
    """The numbers of workers to plan for that `--workers` gives; empty without it."""
    if not text:
        return []
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
        raise UsageError(f"{option} {text}: expected a duration longer than 0s.")
    return seconds


def _pool_json(pool: PoolPlan, job_plan: JobPlan) -> dict[str, Any] | None:
    return None if pool.plan is None else workers_json(pool.plan, compiled=job_plan.setup.compiled)


def _device(job: FinetuneJob, name: str, memory: str, world_size: int) -> Device:
    """The device of one worker. CPU workers share this machine's memory unless --device-memory is given."""
    if name and memory:
        raise UsageError("--device and --device-memory: set only one of them.")
    if memory:
        return Device(f"{memory} per worker", parse_bytes(memory, "--device-memory"))
    if job.spec.workers.gpus == 0:
        if name:
            raise UsageError(f"--device {name}: the job's workers have no GPUs (workers.gpus: 0); use --device-memory.")
        return Device("this machine's memory, shared by the workers", machine_memory_bytes() // world_size)
    execution, pools = job.spec.execution, cheapest_first(job.spec.workers.pools)
    of_pool = device_of_gpu_type(pools[0].gpu_type) if pools else None
    if of_pool and not name:
        return _gpu(job, of_pool, f"{of_pool}, of pool {pools[0].name}")
    chosen = name or (DEFAULT_FP8_DEVICE if execution.is_fp8 else DEFAULT_DEVICE)
    return _gpu(job, chosen, chosen if name else f"{chosen}, assumed (--device)")


def _device_of_pool(job: FinetuneJob, name: str, memory: str, world_size: int, gpu_type: str) -> Device:
    """The device of one worker in a pool: by the type of its GPU or, if that is empty or not known, by the options."""
    known = device_of_gpu_type(gpu_type)
    if known and job.spec.workers.gpus:
        return _gpu(job, known, known)
    if gpu_type and not (name or memory):
        raise UsageError(f"gpuType {gpu_type} is not known: pass --device or --device-memory.")
    default = DEFAULT_FP8_DEVICE if job.spec.execution.is_fp8 else DEFAULT_DEVICE
    if job.spec.workers.gpus and not (name or memory):
        return _gpu(job, default, f"{default}, assumed (--device)")
    return _device(job, name, memory, world_size)


def _gpu(job: FinetuneJob, name: str, description: str) -> Device:
    memory_bytes, precision = device_memory_bytes(name), job.spec.execution.precision
    if problem := missing_capability(precision, name, DEVICE_CAPABILITIES[name.lower()]):
        raise JobError(problem)
    return Device(description, memory_bytes, name.lower())


def _model_config(job: FinetuneJob, file: Path | None) -> dict[str, Any]:
    """The model's `config.json`: the given file, that in its folder or in the Hub's cache, or that of a known model."""
    if job.spec.training.has_user_code:
        raise JobError("training: a plan is for spotune's own training loop, and your function decides itself")
    source = job.spec.model.source
    if file is None and source.startswith("hf://") and known_config(source) is None:
        file = cached_config(source, job.spec.model.revision, os.environ)
    if file is None and "://" not in source:
        file = Path(source) / "config.json"
        if not file.is_file():
            raise JobError(
                f"model.source: {source} has no config.json, which the plan needs. Check the path "
                f"({HUB_HINT}), or pass the file with --config FILE."
            )
    if file is not None:
        return _read_config(file)
    known = known_config(source)
    if known is None:
        raise JobError(
            f"model.source: the size of {source} is not known, and `spotune plan` uses no network. Download the "
            f"model's config.json and pass it with --config FILE. ({len(KNOWN_CONFIGS)} known models need no file, "
            "such as hf://google-t5/t5-3b and hf://meta-llama/Llama-3.1-8B.)"
        )
    return dict(known)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {file}: cannot read the file: {error.strerror}.") from error
    except ValueError as error:
        raise JobError(f"{file}: invalid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise JobError(f"{file}: expected a JSON object, as transformers writes it.")
    return config
