"""A job whose workers have cost `spec.maxCost` commits and releases its nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotune.job import GpuSecondsStatus
from spotune_operator.settings import Settings
from tests.operator.support.scenarios import SETTINGS, Scenario, a_cluster_job, training_scenario

PRICED = replace(SETTINGS, spot_gpu_price=1.0, on_demand_gpu_price=3.0)


def a_scenario(spot_hours: float, on_demand_hours: float, limit: str = "10 USD") -> Scenario:
    scenario = training_scenario(maxCost=limit)
    scenario.settings = PRICED
    used = GpuSecondsStatus(spot=3600 * spot_hours, on_demand=3600 * on_demand_hours, as_of="2027-01-15T08:00:00Z")
    scenario.status = scenario.status.model_copy(update={"gpu_seconds": used})
    scenario.has_pods(workers=0)
    return scenario


def test_job_over_its_limit_commits_and_is_suspended() -> None:
    scenario = a_scenario(spot_hours=4, on_demand_hours=2)
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
    scenario = a_scenario(spot_hours=4, on_demand_hours=1)
    assert scenario.decide().command == ""
    assert scenario.condition("CostLimitReached").message == "the workers have cost at least 70 % of 10 USD"


@pytest.mark.parametrize(("settings", "limit"), [(SETTINGS, "10 USD"), (PRICED, "10 EUR")])
def test_limit_without_prices_is_said_to_have_no_effect(settings: Settings, limit: str) -> None:
    scenario = a_scenario(spot_hours=40, on_demand_hours=20, limit=limit)
    scenario.settings = settings
    assert scenario.decide().command == ""
    condition = scenario.condition("CostLimitReached")
    assert (condition.status, condition.reason) == ("Unknown", "NoPrices")
    assert "set spotGpuPrice, onDemandGpuPrice and currency" in condition.message
