"""What the workers have used: GPU seconds by capacity, node seconds by pool, and money.

All three are counted together, from the status of the last count and the pods that run since then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotune.job import CostStatus, FinetuneJobStatus, GpuSecondsStatus, PoolSpec, WorkersSpec
from spotune.pools.terms import Choice
from spotune.units.money import Price
from spotune.units.timestamps import rfc3339, unix_time
from spotune_operator.children.raycluster import ON_DEMAND_GROUP
from spotune_operator.observe.nodes import NodeView
from spotune_operator.observe.state import Observed, Pod
from spotune_operator.prices import NodePrice, find_price
from spotune_operator.reconcile.pools.choosing import pool_statuses
from spotune_operator.settings import Settings

POOLS_SOURCE = "price of workers.pools"
"""Source of prices that the job has itself."""
_NO_PRICES = "set price in workers.pools, or prices in the operator's values"


@dataclass(frozen=True)
class Usage:
    """The input of a count.

    Attributes:
        workers: ``spec.workers`` of the job.
        previous: The status of the last reconcile.
        observed: The state of the cluster.
        settings: The operator's.
        now: Unix time.
    """

    workers: WorkersSpec
    previous: FinetuneJobStatus
    observed: Observed
    settings: Settings
    now: float


def used(context: Usage, choice: Choice | None) -> dict[str, Any]:
    """The fields of the status about what the workers have used, and about the pools.

    Args:
        context: The input of the count.
        choice: The choice between the pools; None without pools.
    """
    pods = list(_counted(context))
    fields: dict[str, Any] = {"gpu_seconds": gpu_seconds(context, pods), "cost": cost(context, pods)}
    if choice is None:
        return fields | {"pools": [], "pools_moved_at": None}
    seconds = {pool.name: pool.node_seconds for pool in context.previous.pools}
    for pod, lasted in pods:
        seconds[pod.group] = round(seconds.get(pod.group, 0.0) + lasted, 1)
    moved_at = choice.moved_at
    return fields | {
        "pools": pool_statuses(context.workers, choice, context.observed.pods, seconds),
        "pools_moved_at": rfc3339(moved_at) if moved_at is not None else None,
    }


def counts(workers: WorkersSpec, pod: Pod) -> bool:
    """Whether the time of a pod is counted: that of a worker with GPUs, and with pools that of every worker."""
    is_counted = bool(pod.gpus) or bool(workers.pools)
    return pod.component == "workers" and is_counted and pod.started is not None


def _counted(context: Usage) -> Iterator[tuple[Pod, float]]:
    """The pods that count, with their seconds since the last count; none if that was just now.

    A pod counts from the start of its containers. One that starts and ends between two reconciles is missed.
    """
    counted = unix_time(context.previous.gpu_seconds.as_of)
    now = math.floor(context.now)  # the status has whole seconds
    if counted is not None and context.now - counted < context.settings.poll_seconds:
        return
    for pod in context.observed.pods:
        if counts(context.workers, pod):
            yield pod, max(0.0, now - max(pod.started or 0.0, counted or 0.0))


def gpu_seconds(context: Usage, pods: Sequence[tuple[Pod, float]]) -> GpuSecondsStatus:
    """The GPU seconds used so far: those of the status, and GPUs of running pods times seconds since then."""
    previous = context.previous.gpu_seconds
    if not pods:
        return previous
    seconds = {True: previous.on_demand, False: previous.spot}
    for pod, lasted in pods:
        seconds[_is_on_demand(context.workers, pod)] += pod.gpus * lasted
    as_of = rfc3339(math.floor(context.now))
    return GpuSecondsStatus(spot=round(seconds[False], 1), on_demand=round(seconds[True], 1), as_of=as_of)


def cost(context: Usage, pods: Sequence[tuple[Pod, float]]) -> CostStatus | None:
    """The money spent so far, and saved against the same nodes on demand; None before any worker ran.

    A worker is taken to have its node for itself. Nodes without a price are counted apart, so that the sum does not
    look complete.
    """
    found = context.previous.cost
    for pod, lasted in pods:
        node = context.observed.nodes.get(pod.node)
        found = _add(found or CostStatus(), _price_of(context, pod, node), lasted, pod.node)
    return found


@dataclass(frozen=True)
class _Price:
    """The price of a worker's node.

    Attributes:
        price: Of a node and hour.
        on_demand: Of the same node on demand; None if it is not known.
        source: Where it is from.
        date: Its day; empty if it is not known.
    """

    price: Price
    on_demand: Price | None
    source: str
    date: str


def _price_of(context: Usage, pod: Pod, node: NodeView | None) -> _Price | None:
    workers = context.workers
    pool = next((each for each in workers.pools if each.name == pod.group), None)
    listed = find_price(context.settings.node_prices, node.labels) if node is not None else None
    is_on_demand = _is_on_demand(workers, pod)
    if pool is not None and pool.price is not None:
        other = _on_demand_price(pool, workers.pools) or _same_currency(pool, listed)
        return _Price(pool.price, pool.price if is_on_demand else other, POOLS_SOURCE, "")
    if listed is None:
        return None
    return _Price(listed.price, listed.price if is_on_demand else listed.on_demand, listed.source, listed.date)


def _on_demand_price(pool: PoolSpec, pools: Sequence[PoolSpec]) -> Price | None:
    """The lowest price of the job's pools on demand with the same type of GPU."""
    same = [each.price for each in pools if each.capacity == "on-demand" and each.gpu_type == pool.gpu_type]
    return min((price for price in same if price is not None), key=lambda price: price.amount, default=None)


def _same_currency(pool: PoolSpec, listed: NodePrice | None) -> Price | None:
    on_demand = listed.on_demand if listed is not None else None
    is_same = on_demand is not None and pool.price is not None and on_demand.currency == pool.price.currency
    return on_demand if is_same else None


def _add(before: CostStatus, price: _Price | None, seconds: float, node: str) -> CostStatus:
    """The cost with so many seconds of one more node."""
    if price is None or before.currency not in ("", price.price.currency):
        why = f"no price for node {node or 'unknown'}: {_NO_PRICES}"
        if price is not None:
            why = f"{price.price} for node {node} has another currency than before, {before.currency}"
        left_out = round(before.unpriced_node_seconds + seconds, 1)
        return before.model_copy(update={"unpriced_node_seconds": left_out, "unknown": why})
    hours = seconds / 3600
    changes: dict[str, Any] = {
        "spent": round((before.spent or 0.0) + hours * price.price.amount, 6),
        "currency": price.price.currency,
        "source": price.source,
        "date": price.date,
    }
    if price.on_demand is not None:
        changes["saved"] = round((before.saved or 0.0) + hours * (price.on_demand.amount - price.price.amount), 6)
    else:
        changes["unknown"] = before.unknown or f"saved: no price on demand for node {node}: {_NO_PRICES}"
    return before.model_copy(update=changes)


def _is_on_demand(workers: WorkersSpec, pod: Pod) -> bool:
    capacities: Mapping[str, str] = {pool.name: pool.capacity for pool in workers.pools}
    if capacities:
        return capacities.get(pod.group) == "on-demand"
    return pod.group == ON_DEMAND_GROUP or workers.capacity == "on-demand"
