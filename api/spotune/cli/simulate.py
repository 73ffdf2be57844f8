"""`spotune simulate TRACE.csv`: goodput, cost and finishing time of several scenarios on a spot trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer
from rich.console import Console

from spotune.cli.simulate_table import print_comparison
from spotune.deadline.odds import deadline_odds, print_odds, read_markets, switching_of
from spotune.deadline.terms import work_seconds
from spotune.errors import UsageError
from spotune.job import FinetuneJob, WorkersSpec
from spotune.job_file.load import load_job
from spotune.pools.markets import print_run, run_as_json, supplies_of_job, supplies_of_markets
from spotune.pools.simulation import simulate_pools
from spotune.pools.terms import Wish
from spotune.simulate.compare import Prices, all_scenarios, compare
from spotune.simulate.measured import read_timings
from spotune.simulate.supply import Capacity, HeadCapacity
from spotune.simulate.terms import NEVER, Scenario, Timings
from spotune.simulate.trace import Trace, read_trace
from spotune.units.durations import Duration

T = TypeVar("T")
_Price = Annotated[float | None, typer.Option(min=0, help="Price of a worker node per hour.")]


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE.csv", help="Available spot nodes over time, with the columns seconds,nodes."),
    ],
    job: Annotated[Path | None, typer.Option(help="Job file to take workers, head, checkpoint and retry from.")] = None,
    measured: Annotated[Path | None, typer.Option(help="Directory of a real run to take timings from.")] = None,
    workers: Annotated[str, typer.Option(help="Numbers of worker nodes, such as 4,8.")] = "",
    min_workers: Annotated[int | None, typer.Option("--min", min=1, help="Minimum number of worker nodes.")] = None,
    checkpoint_every: Annotated[str, typer.Option(help="Values of checkpoint.every, such as auto,5m,200.")] = "",
    head: Annotated[str, typer.Option(help="Values of head.capacity: on-demand,spot.")] = "",
    capacity: Annotated[str, typer.Option(help="Values of workers.capacity: spot,spot-then-on-demand,on-demand.")] = "",
    on_demand_after: Annotated[str, typer.Option(help="Value of workers.onDemandAfter.")] = "",
    resize_cooldown: Annotated[str, typer.Option(help="Value of workers.resizeCooldown, or never.")] = "",
    notice: Annotated[str, typer.Option(help="Time between preemption notice and loss of a spot node.")] = "0s",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the job. The trace is repeated until they are done.")
    ] = None,
    step_seconds: Annotated[
        str, typer.Option(help="Seconds per step, such as 1.2, or by number of workers, such as 4=2.3,8=1.2.")
    ] = "",
    start_up: Annotated[str, typer.Option(help="Time from the start of a worker group to its first step.")] = "",
    join: Annotated[str, typer.Option(help="Time from the arrival of a node until it can train.")] = "",
    restore: Annotated[str, typer.Option(help="Time to load a checkpoint.")] = "",
    stall: Annotated[str, typer.Option(help="Time for which a checkpoint blocks training.")] = "",
    commit: Annotated[str, typer.Option(help="Time until a checkpoint is durable.")] = "",
    detection: Annotated[str, typer.Option(help="Time from the loss of a worker to the end of its group.")] = "",
    head_loss: Annotated[str, typer.Option(help="Time from the loss of a head to the next driver.")] = "",
    spot_price: _Price = None,
    on_demand_price: _Price = None,
    head_price: Annotated[str, typer.Option(help="Price of the head node per hour, as SPOT,ON-DEMAND.")] = "0,0",
    deadline: Annotated[
        str, typer.Option(help="The odds of a deadline instead, such as 36h, by the policy of spec.deadline.")
    ] = "",
    market: Annotated[
        list[Path] | None, typer.Option(help="Trace of a further spot market or pool; repeatable.")
    ] = None,
    on_demand_start: Annotated[
        str, typer.Option(help="With --deadline: time from the request of on-demand nodes to the next step.")
    ] = "10m",
    repeats: Annotated[int, typer.Option(min=1, help="Number of simulations per scenario with randomness.")] = 20,
    output: Annotated[Literal["text", "json"], typer.Option(help="Output format.")] = "text",
) -> None:
    """Replay a preemption trace, and print goodput, cost and finishing time of each scenario.

    Options with several comma-separated values are combined: each combination is one scenario.

    With --market, or a job with workers.pools, the operator's own choice between pools is simulated: each trace is a
    pool with the name of its file. Pools of a job that are on demand need no trace.

    Example: spotune simulate examples/traces/v100-4.csv --workers 4 --step-seconds 2.5 --checkpoint-every auto,1m,10m

    Example: spotune simulate trace.csv --job job.yaml --measured runs/my-job --head on-demand,spot --steps 20000

    Example: spotune simulate spot-a.csv --market spot-b.csv --job job.yaml --step-seconds 2.5 --steps 40000

    Example: spotune simulate zone-a.csv --market zone-b.csv --deadline 36h --steps 40000 --step-seconds 2.5 --workers 1
    """
    loaded = load_job(job) if job is not None else None
    workers_of_job = loaded.spec.workers if loaded is not None else None
    base, times = _from_job(loaded)
    if measured is not None:
        times = read_timings(measured, times)
    given: dict[str, Any] = {
        "start_up": _seconds(start_up, "--start-up"),
        "join": _seconds(join, "--join"),
        "restore": _seconds(restore, "--restore"),
        "stall": _seconds(stall, "--stall"),
        "commit": _seconds(commit, "--commit"),
        "detection": _seconds(detection, "--detection"),
        "head_loss": _seconds(head_loss, "--head-loss"),
    }
    times = replace(times, **{name: seconds for name, seconds in given.items() if seconds is not None})
    if given["start_up"] is not None:
        times = replace(times, first_start_up=None)
    worker_counts = _list(workers, "--workers", _count) or [base.workers]
    times = replace(times, step=_step_seconds(step_seconds, max(worker_counts)) or times.step)
    if not times.step:
        raise UsageError(
            "--step-seconds: set the seconds per step, such as 1.2, or use --measured with a run's directory."
        )
    prices = Prices(spot_price, on_demand_price, *_head_prices(head_price))
    if deadline:
        start = _seconds(on_demand_start, "--on-demand-start") or 0.0
        _print_odds(deadline, [trace, *(market or [])], worker_counts, steps, times, start, prices, output)
        return
    after, notice_seconds = _seconds(on_demand_after, "--on-demand-after"), _seconds(notice, "--notice")
    cooldown = NEVER if resize_cooldown == "never" else _seconds(resize_cooldown, "--resize-cooldown")
    base = replace(
        base,
        on_demand_after=base.on_demand_after if after is None else after,
        resize_cooldown=base.resize_cooldown if cooldown is None else cooldown,
        notice=notice_seconds or 0.0,
    )
    scenarios = [
        replace(scenario, min_workers=min(min_workers or base.min_workers, scenario.workers))
        for scenario in all_scenarios(
            base,
            workers=worker_counts,
            checkpoint_every=_list(checkpoint_every, "--checkpoint-every", _every) or [base.checkpoint_every],
            head=_list(head, "--head", _one_of(get_args(HeadCapacity))) or [base.head],
            capacity=_list(capacity, "--capacity", _one_of(get_args(Capacity))) or [base.capacity],
        )
    ]
    pools = workers_of_job.pools if workers_of_job is not None else []
    if market or pools:
        traces = read_markets([trace, *(market or [])])
        _print_pools(_one(scenarios), workers_of_job if pools else None, traces, times, prices, steps, output)
        return
    results = compare(read_trace(trace), scenarios, times, prices, steps, repeats)
    if output == "json":
        found = {"times": asdict(times), "choices": [row.as_json() for row in results]}
        typer.echo(json.dumps(found, indent=2))
    else:
        print_comparison(results, times, Console())


def _print_odds(
    deadline: str,
    files: Sequence[Path],
    worker_counts: Sequence[int],
    steps: int | None,
    times: Timings,
    on_demand_start: float,
    prices: Prices,
    output: str,
) -> None:
    """Print the odds of a deadline on the traces of one or several markets."""
    to_deadline = _seconds(deadline, "--deadline")
    if not to_deadline:
        raise UsageError(f"--deadline {deadline}: expected a duration longer than 0s, such as 36h.")
    if steps is None:
        raise UsageError("--steps: set the number of steps of the job, which --deadline needs.")
    if len(worker_counts) > 1:
        raise UsageError("--workers: --deadline takes one number of workers.")
    (workers,) = worker_counts
    switching = switching_of(times, on_demand_start)
    work = work_seconds(steps, times.step, workers) + steps * times.data_wait
    odds = deadline_odds(
        read_markets(files),
        nodes=workers,
        work=work,
        to_deadline=to_deadline,
        switching=switching,
        prices=(prices.spot, prices.on_demand),
    )
    if output == "json":
        found = {"workSeconds": round(work, 1), "deadlineSeconds": to_deadline, "odds": [row.as_json() for row in odds]}
        typer.echo(json.dumps(found, indent=2))
    else:
        print_odds(odds, work, to_deadline, switching, Console())


def _one(scenarios: Sequence[Scenario]) -> Scenario:
    if len(scenarios) > 1:
        raise UsageError("--workers, --checkpoint-every, --head and --capacity: pools take one value each.")
    return scenarios[0]


def _print_pools(
    scenario: Scenario,
    workers: WorkersSpec | None,
    traces: Mapping[str, Trace],
    times: Timings,
    prices: Prices,
    steps: int | None,
    output: str,
) -> None:
    """Print what becomes of a job in several pools.

    Args:
        scenario: The job. Its head is on demand, and losses have no notice.
        workers: `spec.workers` of a job with pools; None: each trace is a pool.
        traces: By name of the pool.
        times: How long everything takes.
        prices: Of a node and hour, for pools that no job prices.
        steps: Steps of the job; None: as many as fit into the shortest trace.
        output: `text` or `json`.
    """
    if scenario.head == "spot" or scenario.notice or scenario.capacity == "on-demand":
        raise UsageError("--head spot, --notice and --capacity on-demand: are not simulated with several pools.")
    if workers is not None:
        supplies = supplies_of_job(workers, traces)
    else:
        shared = (prices.spot, prices.on_demand)
        supplies = supplies_of_markets(traces, scenario.workers, scenario.on_demand_after, shared, scenario.capacity)
    wish = Wish(scenario.workers, scenario.min_workers, scenario.resize_cooldown)
    run = simulate_pools(supplies, wish, times, checkpoint_every=scenario.checkpoint_every, steps=steps)
    if output == "json":
        typer.echo(json.dumps({"times": asdict(times), **run_as_json(run, supplies)}, indent=2))
    else:
        print_run(run, supplies, Console())


def _from_job(job: FinetuneJob | None) -> tuple[Scenario, Timings]:
    """Scenario and timings from a job, or the API's defaults without one."""
    if job is None:
        return Scenario(workers=4), Timings(step={})
    workers, every = job.spec.workers, job.spec.checkpoint.every
    scenario = Scenario(
        workers=workers.count,
        min_workers=workers.min_count,
        checkpoint_every=every.seconds if isinstance(every, Duration) else every,
        head=job.spec.head.capacity,
        capacity=workers.capacity,
        on_demand_after=workers.on_demand_after.seconds,
        resize_cooldown=workers.resize_cooldown.seconds,
    )
    backoff = job.spec.retry.backoff
    return scenario, Timings(step={}, backoff=backoff.initial.seconds, longest_backoff=backoff.max.seconds)


def _list(text: str, option: str, read: Callable[[str, str], T]) -> list[T]:
    """The comma-separated values without duplicates; empty for an empty text."""
    return list(dict.fromkeys(read(part.strip(), option) for part in text.split(",") if text))


def _count(text: str, option: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{option} {text}: expected whole numbers from 1, separated by commas, such as 4,8.")
    return int(text)


def _every(text: str, option: str) -> str | float | int:
    if text == "auto":
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    seconds = _seconds(text, option)
    if not seconds:
        raise UsageError(f"{option} {text or 'nothing'}: expected auto, a duration such as 5m, or a number of steps.")
    return seconds


def _one_of(allowed: Sequence[str]) -> Callable[[str, str], Any]:
    def read(text: str, option: str) -> str:
        if text not in allowed:
            raise UsageError(f"{option} {text or 'nothing'}: expected {', '.join(allowed)}.")
        return text

    return read


def _seconds(text: str, option: str) -> float | None:
    """Seconds of a duration; None for an empty text."""
    if not text:
        return None
    try:
        return Duration(text).seconds
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _step_seconds(text: str, workers: int) -> dict[int, float]:
    """Seconds per step by number of workers; a single value is for the largest requested number of workers."""
    found: dict[int, float] = {}
    for part in text.split(",") if text else []:
        count, equals, seconds = part.partition("=")
        try:
            found[_count(count.strip(), "--step-seconds") if equals else workers] = float(seconds if equals else count)
        except ValueError:
            found[workers] = 0.0
    if any(not 0 < seconds < NEVER for seconds in found.values()):
        raise UsageError(f"--step-seconds {text}: expected seconds such as 1.2, or 4=2.3,8=1.2 by number of workers.")
    return found


def _head_prices(text: str) -> tuple[float, float]:
    try:
        spot, on_demand = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"--head-price {text}: expected two prices, on spot and on demand, such as 0.1,0.3."
        ) from error
    return spot, on_demand
