"""With a deadline, slack decides when workers get nodes of on-demand pools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile.pools.test_decide_pools import DEAR, SPOT, has_pods_in, leaving
from tests.operator.support.scenarios import NOW, Scenario, new_scenario, replicas

HOUR = 3600.0
MEASURED: dict[str, Any] = {"totalSteps": 100, "lastCheckpoint": {"step": 40, "time": NOW}}


def a_scenario(deadline: str, *pools: dict[str, Any]) -> Scenario:
    """A job that has trained 40 of 100 steps in its first pool, with 6 h to go."""
    pools = pools or (SPOT, DEAR)
    workers = {"count": 2, "min": 1, "pools": list(pools), "poolPatience": "5m"}
    scenario = new_scenario(workers=workers, deadline=deadline)
    scenario.observe(created=NOW)
    scenario.has_children()
    has_pods_in(scenario)
    scenario.supervisor_reports()
    scenario.decide()
    has_pods_in(scenario, **{str(pools[0]["name"]).replace("-", "_"): (2, 0)})
    scenario.supervisor_reports(step=40, phase="Training", etaSeconds=6 * HOUR, **MEASURED)
    scenario.decide()
    return scenario


def lose_workers(scenario: Scenario, **pools: tuple[int, int]) -> None:
    has_pods_in(scenario, **pools)
    scenario.supervisor_reports(step=40, phase="WaitingForWorkers", **MEASURED)


def test_with_slack_workers_wait_for_spot_pools_longer_than_the_patience() -> None:
    scenario = a_scenario("20h")
    assert scenario.condition("DeadlineAtRisk").message == "trains on spot nodes, with about 14 h 00 min of slack"
    lose_workers(scenario, spot_a=(1, 1))
    decision = scenario.decide()
    assert replicas(decision) == {"spot-a": 2, "dear": 0}
    decision = scenario.decide(after=600)
    assert leaving(decision) == {"spot-a": ["spot-a-1"]}, "the pool has refused"
    assert replicas(decision) == {"spot-a": 2, "dear": 0}, "one worker asks again"
    lose_workers(scenario, spot_a=(1, 0))
    for _ in range(3):
        assert replicas(scenario.decide(after=600)) == {"spot-a": 2, "dear": 0}
    assert scenario.condition("DeadlineAtRisk").message.startswith("waits for spot nodes, with about 13 h")


def test_a_wait_that_takes_its_share_of_the_slack_ends_in_the_on_demand_pool() -> None:
    scenario = a_scenario("9h")
    lose_workers(scenario, spot_a=(1, 0))
    assert replicas(scenario.decide())["dear"] == 0
    deadline = scenario.status.deadline
    assert deadline is not None
    assert deadline.waiting_since is not None
    assert replicas(scenario.decide(after=1200))["dear"] == 0
    lose_workers(scenario, spot_a=(1, 1))
    scenario.decide(after=600)
    assert replicas(scenario.decide(after=600))["dear"] == 1
    assert scenario.condition("DeadlineAtRisk").message.startswith("on-demand nodes stand in for missing spot nodes")
    has_pods_in(scenario, spot_a=(2, 0))
    scenario.decide()
    assert scenario.status.deadline is not None
    assert scenario.status.deadline.waiting_since is None


def test_without_slack_all_workers_move_to_the_on_demand_pool_in_one_resize() -> None:
    scenario = a_scenario("6h10m")
    decision = scenario.decide()
    assert (replicas(decision), leaving(decision)) == ({"spot-a": 2, "dear": 2}, {})
    condition = scenario.condition("DeadlineAtRisk")
    assert (condition.status, condition.reason) == ("True", "NoSlackLeft")
    assert condition.message.endswith("workers move to on-demand pools, as far as these have room")
    has_pods_in(scenario, spot_a=(2, 0), dear=(1, 1))
    assert leaving(scenario.decide()) == {}, "spot workers train until all others run"
    has_pods_in(scenario, spot_a=(2, 0), dear=(2, 0))
    decision = scenario.decide()
    assert (replicas(decision), leaving(decision)) == (
        {"spot-a": 0, "dear": 2},
        {"spot-a": ["spot-a-0", "spot-a-1"]},
    )


@pytest.mark.parametrize(
    ("pool", "status", "message"),
    [
        (SPOT, "True", "add a pool with capacity: on-demand"),
        (DEAR, "False", "all nodes are on-demand, with about 10 min 00 s of slack"),
    ],
)
def test_pools_of_one_kind_only_say_what_is_known(pool: dict[str, Any], status: str, message: str) -> None:
    scenario = a_scenario("6h10m", pool)
    assert replicas(scenario.decide()) == {pool["name"]: 2}
    condition = scenario.condition("DeadlineAtRisk")
    assert condition.status == status
    assert condition.message.endswith(message)


def test_before_the_speed_is_known_the_patience_decides() -> None:
    scenario = new_scenario(workers={"count": 2, "pools": [SPOT, DEAR], "poolPatience": "5m"}, deadline="20h")
    scenario.observe(created=NOW)
    scenario.decide()
    message = scenario.condition("DeadlineAtRisk").message
    assert message == "the speed is not measured yet: until then workers.poolPatience decides about pools"
