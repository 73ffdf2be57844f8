"""A deadline keeps workers from on-demand pools, or moves them there."""

from __future__ import annotations

from dataclasses import replace

from spotune.pools.on_demand import OnDemandUse, with_on_demand
from spotune.pools.terms import Pool, Wish
from tests.api.support.simulated_pools import SimulatedPools

SPOT, OTHER, SURE = Pool("spot", 4, 60.0), Pool("other", 4, 60.0), Pool("sure", 4, 60.0, on_demand=True)
POOLS = (SPOT, OTHER, SURE)


def run(cluster: SimulatedPools, seconds: float, use: OnDemandUse, pools: tuple[Pool, ...] = POOLS) -> None:
    """Let time pass while the deadline asks for a use of on-demand pools."""
    cooldown = 0.0 if use is OnDemandUse.FIRST else 300.0
    cluster.wish = replace(cluster.wish, cooldown=cooldown)
    for _ in range(int(seconds / 10)):
        cluster.pools, cluster.memory = with_on_demand(pools, cluster.memory, use)
        cluster.step(10)


def world(**nodes: int) -> SimulatedPools:
    return SimulatedPools(POOLS, Wish(2), {"spot": 0, "other": 0, "sure": 0} | nodes)


def test_workers_wait_for_spot_pools_while_there_is_slack() -> None:
    cluster = world(sure=4)
    run(cluster, 1200, OnDemandUse.NOT_YET)
    assert cluster.ready() == {}
    assert set(cluster.waiting()) == {"spot", "other"}, "each spot pool is asked"
    run(cluster, 120, OnDemandUse.AS_LISTED)
    assert cluster.ready() == {"sure": 2}
    run(cluster, 1200, OnDemandUse.NOT_YET)
    assert cluster.ready() == {"sure": 2}, "workers that run stay until spot nodes are there"
    cluster.nodes["other"] = 4
    run(cluster, 3600, OnDemandUse.NOT_YET)
    assert cluster.ready() == {"other": 2}


def test_without_slack_all_workers_move_at_once_and_train_on_meanwhile() -> None:
    cluster = world(spot=4, sure=4)
    run(cluster, 100, OnDemandUse.AS_LISTED)
    cluster.moved_at = cluster.now
    run(cluster, 20, OnDemandUse.FIRST)
    assert (cluster.ready(), cluster.moves) == ({"spot": 2}, [])
    run(cluster, 30, OnDemandUse.FIRST)
    assert cluster.ready() == {"sure": 2}
    assert len(set(cluster.moves)) == 1, "all spot workers left in one move, within the cooldown"


def test_without_slack_an_on_demand_pool_that_refused_is_asked_again_and_again() -> None:
    cluster = world(spot=4)
    run(cluster, 2400, OnDemandUse.FIRST)
    assert cluster.memory["sure"].refusals > 4
    assert cluster.ready() == {"spot": 2}
    cluster.nodes["sure"] = 4
    run(cluster, 120, OnDemandUse.FIRST)
    assert cluster.ready() == {"sure": 2}


def test_an_on_demand_pool_that_is_better_than_all_spot_pools_is_always_used() -> None:
    pools = (SURE, SPOT)
    limited, _ = with_on_demand(pools, {}, OnDemandUse.NOT_YET)
    assert limited == list(pools)
