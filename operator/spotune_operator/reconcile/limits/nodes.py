"""The nodes of a job's workers as the policy of deadlines sees them: one spot market, and on-demand nodes.

With pools, the cheapest spot pool that has nodes is the market, and the cheapest on-demand pool is the safe one. All
spot pools together count as available while they carry all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from spotune.job import DeadlineStatus, FinetuneJobStatus, PoolSpec, WorkersSpec
from spotune.units.timestamps import unix_time
from spotune_operator.children.raycluster import ON_DEMAND_GROUP
from spotune_operator.observe.state import Pod
from spotune_operator.settings import Settings

SPOT: Final = "spot"
"""Name of the only market of a job without pools."""
_ASSUMED_PRICES: Final = (1.0, 3.0)
"""Of spot and on-demand nodes that no setting prices: their ratio is what the policy needs."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job's workers.

    Attributes:
        capacity: Kinds of nodes that the workers may have.
        market: Name of the spot market.
        prices: Price of a spot node and of an on-demand node.
        has_spot: Whether spot nodes carry all workers.
        paid: On-demand workers that run.
        paid_since: Unix time of the creation of the oldest on-demand worker; None without one.
        missing: Workers that wait for nodes.
        waited: Seconds for which workers have waited.
    """

    capacity: Literal["spot", "on-demand", "spot-then-on-demand"]
    market: str
    prices: tuple[float, float]
    has_spot: bool
    paid: int
    paid_since: float | None
    missing: int
    waited: float


def is_short(workers: WorkersSpec, pods: Sequence[Pod]) -> bool:
    """Whether a job with pools has worker pods, of which fewer run than it asks for."""
    return bool(workers.pools and pods) and sum(pod.runs for pod in pods) < workers.count


def nodes_of(
    workers: WorkersSpec,
    pods: Sequence[Pod],
    status: FinetuneJobStatus,
    measured: DeadlineStatus,
    settings: Settings,
    now: float,
) -> Nodes:
    """The nodes of a job.

    Args:
        workers: ``spec.workers``.
        pods: Its worker pods.
        status: The status of the last reconcile, with what pools have refused.
        measured: Since when its workers wait.
        settings: The operator's, with prices.
        now: Unix time.
    """
    safe = {pool.name for pool in workers.pools if pool.capacity == "on-demand"} or {ON_DEMAND_GROUP}
    on_demand = [pod for pod in pods if pod.group in safe]
    spot = [pod for pod in pods if pod.group not in safe]
    paid, paid_since = sum(pod.runs for pod in on_demand), min((pod.created for pod in on_demand), default=None)
    if workers.pools:
        running = sum(pod.runs for pod in spot)
        since = unix_time(measured.waiting_since)
        market = _market(workers.pools, pods, status)
        return Nodes(
            capacity=_capacity(workers.pools),
            market=market.name if market is not None else SPOT,
            prices=_pool_prices(market, workers.pools) or _listed_prices(settings),
            has_spot=running >= workers.count and not paid,
            paid=paid,
            paid_since=paid_since,
            missing=max(0, workers.count - running - paid),
            waited=now - since if since is not None else 0.0,
        )
    waiting = [pod for pod in spot if not pod.runs]
    is_whole = not waiting and not on_demand and len(pods) >= workers.count
    return Nodes(
        capacity=workers.capacity,
        market=SPOT,
        prices=_listed_prices(settings),
        has_spot=is_whole and workers.capacity != "on-demand",
        paid=paid,
        paid_since=paid_since,
        missing=len(waiting),
        waited=max((now - pod.created for pod in waiting), default=0.0),
    )


def _capacity(pools: Sequence[PoolSpec]) -> Literal["spot", "on-demand", "spot-then-on-demand"]:
    kinds = {pool.capacity for pool in pools}
    return "spot-then-on-demand" if len(kinds) > 1 else kinds.pop()


def _market(pools: Sequence[PoolSpec], pods: Sequence[Pod], status: FinetuneJobStatus) -> PoolSpec | None:
    """The cheapest spot pool that has nodes, as far as known; if all have refused, the cheapest. None without one."""
    spot = sorted((pool for pool in pools if pool.capacity == "spot"), key=_amount)
    running = {pod.group for pod in pods if pod.runs}
    refused = {pool.name for pool in status.pools if pool.refusals} - running
    return next((pool for pool in spot if pool.name not in refused), spot[0] if spot else None)


def _pool_prices(market: PoolSpec | None, pools: Sequence[PoolSpec]) -> tuple[float, float] | None:
    """Prices of the market and of the cheapest on-demand pool; None if one of them has no price."""
    paid = [pool.price.amount for pool in pools if pool.capacity == "on-demand" and pool.price is not None]
    return (market.price.amount, min(paid)) if market is not None and market.price is not None and paid else None


def _amount(pool: PoolSpec) -> float:
    return pool.price.amount if pool.price is not None else 0.0


def _listed_prices(settings: Settings) -> tuple[float, float]:
    """Prices of a spot node and of the same node on demand: the first pair that the operator's values have."""
    pairs = ((each.price.amount, each.on_demand.amount) for each in settings.node_prices if each.on_demand is not None)
    return next((pair for pair in pairs if 0 < pair[0] < pair[1]), _ASSUMED_PRICES)
