"""The plan in each pool as a rich table: one row per pool, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spotune.plan.memory import GB
from spotune.pools.plan import PoolPlan

_ABSENT = "-"


def print_pools(pools: Sequence[PoolPlan], console: Console) -> None:
    """Print one row per pool, and why the model does not fit into some; nothing without pools."""
    if not pools:
        return
    table = Table(title="Pools, in the order in which they are tried", title_justify="left", title_style="bold")
    for name in ("Pool", "Capacity", "GPU"):
        table.add_column(name, no_wrap=True)
    for name in ("Node and hour", "Workers", "Per hour", "ZeRO stage", "Micro-batch", "Memory"):
        table.add_column(name, justify="right", no_wrap=name == "Memory")
    for each in pools:
        table.add_row(each.pool.name, each.pool.capacity, *_gpu(each), *_cost(each), *_layout(each))
    console.print(table)
    for each in pools:
        if each.problem:
            console.print(Text.assemble((f"Pool {each.pool.name}: ", "bold red"), each.problem))
    console.print(Text("Each row is a group in this pool alone.", style="dim"))


def _gpu(pool: PoolPlan) -> tuple[str]:
    named = pool.pool.gpu_type or "any"
    return (named if pool.plan is None else f"{named} ({pool.plan.device.description})",)


def _cost(pool: PoolPlan) -> tuple[str, str, str]:
    price, cost = pool.pool.price, pool.cost_per_hour
    if price is None or cost is None:
        return _ABSENT, str(pool.workers), _ABSENT
    return str(price), str(pool.workers), f"{cost:,.2f} {price.currency}"


def _layout(pool: PoolPlan) -> tuple[str, str, str]:
    choice = pool.plan.choice if pool.plan is not None else None
    if pool.plan is None or choice is None:
        return _ABSENT, _ABSENT, _ABSENT
    memory = f"{choice.memory.total_bytes / GB:.1f} of {pool.plan.device.memory_bytes / GB:.1f} GB"
    return str(choice.layout.zero_stage), str(choice.layout.micro_batch_size), memory
