"""Compares scenarios on one trace. If it is random which node is lost, results are means of several simulations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

from spotune.goodput import Part
from spotune.simulate.simulation import simulate
from spotune.simulate.terms import NEVER, Scenario, SimulationResult, Timings
from spotune.simulate.trace import Trace


@dataclass(frozen=True)
class Prices:
    """Prices per node and hour, in any currency; None: unknown."""

    spot: float | None = None
    on_demand: float | None = None
    head_spot: float = 0.0
    head_on_demand: float = 0.0


@dataclass(frozen=True)
class ScenarioResult:
    """The results of one scenario, over simulations with different random seeds.

    Attributes:
        scenario: The scenario.
        outcomes: One result per simulation.
        prices: Prices of nodes.
        target_steps: Number of steps of the job; None: as many as fit into the trace.
    """

    scenario: Scenario
    outcomes: Sequence[SimulationResult]
    prices: Prices
    target_steps: int | None

    @property
    def goodput(self) -> float:
        """Mean goodput."""
        return fmean(outcome.goodput for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        """Mean wall-clock seconds."""
        return fmean(outcome.seconds for outcome in self.outcomes)

    @property
    def steps(self) -> float:
        """Mean number of completed steps that were not rolled back."""
        return fmean(outcome.steps for outcome in self.outcomes)

    @property
    def restarts(self) -> float:
        """Mean number of worker groups after the first."""
        return fmean(max(0, outcome.restarts) for outcome in self.outcomes)

    @property
    def finished(self) -> bool:
        """Whether all simulations completed all steps."""
        return all(outcome.finished for outcome in self.outcomes)

    @property
    def cost(self) -> float | None:
        """Mean cost of all nodes; None if a required price is unknown."""
        spot = sum(outcome.spot_seconds for outcome in self.outcomes)
        on_demand = sum(outcome.on_demand_seconds for outcome in self.outcomes)
        prices = self.prices
        if (spot and prices.spot is None) or (on_demand and prices.on_demand is None):
            return None
        head = sum(outcome.head_seconds for outcome in self.outcomes)
        head_price = prices.head_spot if self.scenario.head == "spot" else prices.head_on_demand
        total = spot * (prices.spot or 0.0) + on_demand * (prices.on_demand or 0.0) + head * head_price
        return total / 3600 / len(self.outcomes)

    def share(self, part: Part) -> float:
        """Mean fraction of the wall clock spent on a part."""
        return fmean(outcome.spent[part] / outcome.seconds for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """The result for ``--output json``; all numbers are means."""
        scenario = self.scenario
        return {
            "workers": scenario.workers,
            "min": scenario.min_workers,
            "checkpointEvery": scenario.checkpoint_every,
            "head": scenario.head,
            "capacity": scenario.capacity,
            "onDemandAfterSeconds": scenario.on_demand_after,
            "resizeCooldownSeconds": None if scenario.resize_cooldown == NEVER else scenario.resize_cooldown,
            "noticeSeconds": scenario.notice,
            "goodput": round(self.goodput, 4),
            "parts": {part: round(fmean(outcome.spent[part] for outcome in self.outcomes), 3) for part in Part},
            "wallSeconds": round(self.seconds, 3),
            "finished": self.finished if self.target_steps is not None else None,
            "steps": round(self.steps, 1),
            "stepsLost": round(fmean(outcome.steps_lost for outcome in self.outcomes), 1),
            "restarts": round(self.restarts, 1),
            "spotNodeHours": round(fmean(outcome.spot_seconds for outcome in self.outcomes) / 3600, 4),
            "onDemandNodeHours": round(fmean(outcome.on_demand_seconds for outcome in self.outcomes) / 3600, 4),
            "cost": None if self.cost is None else round(self.cost, 4),
        }


def compare(
    trace: Trace, scenarios: Iterable[Scenario], times: Timings, prices: Prices, steps: int | None, repeats: int
) -> list[ScenarioResult]:
    """Simulate every scenario on the trace; scenarios with randomness (a spot head) `repeats` times."""
    results = []
    for scenario in scenarios:
        seeds = range(repeats if scenario.head == "spot" else 1)
        outcomes = [simulate(trace, scenario, times, steps, seed) for seed in seeds]
        results.append(ScenarioResult(scenario, outcomes, prices, steps))
    return results


def all_scenarios(base: Scenario, **values: Sequence[Any]) -> list[Scenario]:
    """All combinations of the given field values, applied to a base scenario; the last field changes fastest."""
    names = list(values)
    return [replace(base, **dict(zip(names, chosen, strict=True))) for chosen in product(*values.values())]
