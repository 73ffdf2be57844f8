"""Simulated pools from traces and a job, and what became of each as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spotune.errors import UsageError
from spotune.formatting import duration
from spotune.job import WorkersSpec
from spotune.pools.of_job import pools_of
from spotune.pools.simulation import PoolsRun, PoolSupply
from spotune.pools.terms import Pool
from spotune.simulate.trace import Trace

ON_DEMAND: Final = "on-demand"
"""Name of the pool on demand of a simulation without a job's pools."""
_ABSENT: Final = "-"


def supplies_of_job(workers: WorkersSpec, traces: Mapping[str, Trace]) -> list[PoolSupply]:
    """The pools of a job with the traces of their names, in the order in which they are tried.

    Raises:
        UsageError: A spot pool has no trace, or a trace has no pool.
    """
    names = [pool.name for pool in workers.pools]
    missing = [pool.name for pool in workers.pools if pool.capacity == "spot" and pool.name not in traces]
    if missing:
        raise UsageError(f"pool {missing[0]}: has no trace. A trace is named as its pool: --market {missing[0]}.csv.")
    if unknown := sorted(traces.keys() - {*names}):
        raise UsageError(f"{unknown[0]}: is no pool of the job; it has {', '.join(names)}. Name the file as its pool.")
    prices = {pool.name: pool.price.amount for pool in workers.pools if pool.price is not None}
    return [PoolSupply(pool, traces.get(pool.name), prices.get(pool.name)) for pool in pools_of(workers)]


def supplies_of_markets(
    traces: Mapping[str, Trace], workers: int, patience: float, prices: tuple[float | None, float | None], capacity: str
) -> list[PoolSupply]:
    """A pool per trace, in the given order, and one on demand with ``spot-then-on-demand``.

    Args:
        traces: By name of the market.
        workers: Number of workers.
        patience: Seconds that a worker waits for a node.
        prices: Of a node and hour, on spot and on demand; None if not known.
        capacity: ``spot`` or ``spot-then-on-demand``.
    """
    spot = [PoolSupply(Pool(name, workers, patience), trace, prices[0]) for name, trace in traces.items()]
    if capacity == "spot":
        return spot
    return [*spot, PoolSupply(Pool(ON_DEMAND, workers, patience, on_demand=True), None, prices[1])]


def run_as_json(run: PoolsRun, supplies: Sequence[PoolSupply]) -> dict[str, Any]:
    """The run for ``--output json``."""
    cost = run.cost(supplies)
    return {
        "wallSeconds": round(run.seconds, 1),
        "finished": run.finished,
        "goodput": round(run.productive / run.seconds, 4) if run.seconds else 0.0,
        "availability": round(run.staffed / run.seconds, 4) if run.seconds else 0.0,
        "steps": round(run.steps, 1),
        "stepsLost": round(run.steps_lost, 1),
        "restarts": max(0, run.groups - 1),
        "moves": run.moves,
        "cost": None if cost is None else round(cost, 4),
        "pools": [_pool_json(run, supply) for supply in supplies],
    }


def _pool_json(run: PoolsRun, supply: PoolSupply) -> dict[str, Any]:
    used, price = run.used[supply.pool.name], supply.price
    hours = used.node_seconds / 3600
    return {
        "name": supply.pool.name,
        "capacity": "on-demand" if supply.pool.on_demand else "spot",
        "price": price,
        "availableForOne": round(used.any_seconds / run.seconds, 4) if run.seconds else 0.0,
        "availableForAll": round(used.all_seconds / run.seconds, 4) if run.seconds else 0.0,
        "nodeHours": round(hours, 4),
        "cost": None if price is None else round(hours * price, 4),
        "refusals": used.refusals,
        "losses": used.losses,
    }


def print_run(run: PoolsRun, supplies: Sequence[PoolSupply], console: Console) -> None:
    """Print what became of the job, and one row per pool."""
    found = run_as_json(run, supplies)
    cost = "cost not known" if found["cost"] is None else f"cost {found['cost']:,.2f}"
    begin = {True: "finished after", False: "not finished after", None: "after"}[run.finished]
    console.print(
        Text.assemble(
            (f"{begin} {duration(run.seconds)}, {cost}", "bold"),
            f": goodput {found['goodput']:.1%}, workers for {found['availability']:.1%} of the time, "
            f"{found['steps']:,.0f} steps, {found['stepsLost']:,.0f} undone, {found['restarts']} restarts, "
            f"{found['moves']} moves between pools",
        )
    )
    table = Table(title="Pools, in the order in which they are tried", title_justify="left", title_style="dim")
    for name in ("Pool", "Capacity"):
        table.add_column(name, no_wrap=True)
    for name in ("Nodes for one", "Nodes for all", "Node hours", "Cost", "Refusals", "Losses"):
        table.add_column(name, justify="right")
    for pool in found["pools"]:
        table.add_row(
            pool["name"],
            pool["capacity"],
            f"{pool['availableForOne']:.1%}",
            f"{pool['availableForAll']:.1%}",
            f"{pool['nodeHours']:,.1f}",
            _ABSENT if pool["cost"] is None else f"{pool['cost']:,.2f}",
            str(pool["refusals"]),
            str(pool["losses"]),
        )
    console.print(table)
