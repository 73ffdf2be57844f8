"""A job whose workers have cost `spec.maxCost` commits and releases its nodes."""

from __future__ import annotations

from spotune.job import CostStatus
from tests.operator.support.scenarios import Scenario, a_cluster_job, training_scenario


def a_scenario(cost: CostStatus, limit: str = "10 USD") -> Scenario:
    scenario = training_scenario(maxCost=limit)
    scenario.status = scenario.status.model_copy(update={"cost": cost})
    scenario.has_pods(workers=0)
    return scenario


def test_job_over_its_limit_commits_and_is_suspended() -> None:
    scenario = a_scenario(CostStatus(spent=10.0, currency="USD"))
    assert scenario.decide().command == "stop"
    condition = scenario.condition("CostLimitReached")
    assert (condition.status, condition.reason) == ("True", "Spent")
    assert condition.message == "the workers have cost 10 USD: raise spec.maxCost to continue"
    assert scenario.status.phase == "Suspending"
    scenario.observe(pods=())
    scenario.decide()
    assert scenario.status.phase == "Suspended"
    assert scenario.condition("Suspended").message.endswith("raise spec.maxCost to continue from the last commit")
    scenario.edit(a_cluster_job(maxCost="20 USD"))
    scenario.decide()
    assert not scenario.is_true("Suspended")


def test_job_within_its_limit_trains() -> None:
    scenario = a_scenario(CostStatus(spent=7.0, currency="USD"))
    assert scenario.decide().command == ""
    assert scenario.condition("CostLimitReached").message == "the workers have cost at least 70 % of 10 USD"


def test_limit_without_prices_is_said_to_have_no_effect() -> None:
    for cost, why in (
        (CostStatus(unknown="node n1 has no price"), "node n1 has no price"),
        (CostStatus(spent=100.0, currency="EUR"), "prices are in EUR"),
    ):
        scenario = a_scenario(cost)
        assert scenario.decide().command == ""
        condition = scenario.condition("CostLimitReached")
        assert (condition.status, condition.reason) == ("Unknown", "NoPrices")
        assert condition.message.startswith(f"spec.maxCost has no effect: {why}; set price in workers.pools")
