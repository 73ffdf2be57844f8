"""Services in the middle of a rollout, and the traffic that their gateways report."""

from __future__ import annotations

from typing import Any

from spotune.service import ServedVersionStatus
from spotune_operator.serving.gateway_stats import Histogram, VersionCounters, VersionStats
from tests.operator.serving.scenario import OUTPUT, Scenario, a_service

OLD, NEW = "sql-0123abcd-step-120", "sql-0123abcd-step-240"
STEPS = {"steps": [20, 100], "pause": "60s", "promoteIf": {"minRequests": 20}}


def counted(
    requests: float, errors: float = 0, milliseconds: float = 15, weight: float = 0, running: float = 0, error: str = ""
) -> VersionStats:
    """A version with requests whose first token and other tokens all took this time."""
    bounds = [0.01, 0.02, 0.04, 0.08, float("inf")]
    latency = Histogram({bound: requests if bound >= milliseconds / 1000 else 0 for bound in bounds})
    return VersionStats(weight, error, running, VersionCounters(requests, errors, latency, latency))


def served(rollout: dict[str, Any] | None = None, **spec: Any) -> Scenario:
    """A service that serves the first version."""
    scenario = Scenario(a_service(**({"rollout": rollout} if rollout else {}), **spec))
    scenario.serves()
    return scenario


def rolling(rollout: dict[str, Any] | None = None, **spec: Any) -> Scenario:
    """A service whose candidate is running and ready, but has no requests yet."""
    scenario = served(rollout or STEPS, **spec)
    scenario.job(OUTPUT, 240, "Complete")
    scenario.decide()
    scenario.ray_service()
    scenario.pods(head=1, gateway=1, replicas=10)
    scenario.traffic()
    return scenario


def comparing() -> Scenario:
    """A service whose candidate has just got its first requests."""
    scenario = rolling()
    assert scenario.weights() == {OLD: 80, NEW: 20}
    return scenario


def application(scenario: Scenario, version: ServedVersionStatus) -> dict[str, Any]:
    """The application of a version in the next decision."""
    found: dict[str, Any] = scenario.applications()[version.application]
    return found


def rolled_back(scenario: Scenario) -> str:
    """The message of the rollback; the served version gets all requests again."""
    assert scenario.weights() == {OLD: 100}
    condition = scenario.condition("RolledOut")
    assert (condition.status, condition.reason) == ("False", "RolledBack")
    assert scenario.status.rejected is not None
    assert scenario.status.rejected.version == NEW
    assert (scenario.status.rollout, scenario.status.pending_model) == (None, None)
    assert scenario.condition("Ready").status == "True"
    assert scenario.condition("Stalled").status == "False"
    return condition.message
