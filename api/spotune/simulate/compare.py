"""Choices compared on one trace, by the mean of several simulations where chance decides which node is lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

from spotune.goodput import Part
from spotune.simulate.simulation import simulate
from spotune.simulate.terms import NEVER, Choice, Outcome, Times
from spotune.simulate.trace import Trace


@dataclass(frozen=True)
class Prices:
    """Prices for an hour of a node, in any currency; None: not known."""

    spot: float | None = None
    on_demand: float | None = None
    head_spot: float = 0.0
    head_on_demand: float = 0.0


@dataclass(frozen=True)
class Compared:
    """What came of a choice, over simulations that differ in who is lost.

    Attributes:
        choice: What was chosen.
        outcomes: One of each simulation.
        prices: Of nodes.
        steps_wanted: Steps of the job; None: as many as fit into the trace.
    """

    choice: Choice
    outcomes: Sequence[Outcome]
    prices: Prices
    steps_wanted: int | None

    @property
    def goodput(self) -> float:
        """Mean goodput."""
        return fmean(outcome.goodput for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        """Mean wall clock."""
        return fmean(outcome.seconds for outcome in self.outcomes)

    @property
    def steps(self) -> float:
        """Mean number of steps that were not rolled back."""
        return fmean(outcome.steps for outcome in self.outcomes)

    @property
    def restarts(self) -> float:
        """Mean number of worker groups after the first."""
        return fmean(max(0, outcome.restarts) for outcome in self.outcomes)

    @property
    def finished(self) -> bool:
        """Whether every simulation did all steps."""
        return all(outcome.finished for outcome in self.outcomes)

    @property
    def cost(self) -> float | None:
        """Mean cost of all nodes; None where a price that is needed is not known."""
        spot = sum(outcome.spot_seconds for outcome in self.outcomes)
        on_demand = sum(outcome.on_demand_seconds for outcome in self.outcomes)
        prices = self.prices
        if (spot and prices.spot is None) or (on_demand and prices.on_demand is None):
            return None
        head = sum(outcome.head_seconds for outcome in self.outcomes)
        head_price = prices.head_spot if self.choice.head == "spot" else prices.head_on_demand
        total = spot * (prices.spot or 0.0) + on_demand * (prices.on_demand or 0.0) + head * head_price
        return total / 3600 / len(self.outcomes)

    def share(self, part: Part) -> float:
        """Mean share of the wall clock that a part took."""
        return fmean(outcome.spent[part] / outcome.seconds for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """For ``--output json``; seconds by part are means."""
        choice = self.choice
        return {
            "workers": choice.workers,
            "min": choice.fewest,
            "checkpointEvery": choice.every,
            "head": choice.head,
            "capacity": choice.capacity,
            "onDemandAfterSeconds": choice.on_demand_after,
            "resizeCooldownSeconds": None if choice.resize_cooldown == NEVER else choice.resize_cooldown,
            "noticeSeconds": choice.notice,
            "goodput": round(self.goodput, 4),
            "parts": {part: round(fmean(outcome.spent[part] for outcome in self.outcomes), 3) for part in Part},
            "wallSeconds": round(self.seconds, 3),
            "finished": self.finished if self.steps_wanted is not None else None,
            "steps": round(self.steps, 1),
            "stepsLost": round(fmean(outcome.steps_lost for outcome in self.outcomes), 1),
            "restarts": round(self.restarts, 1),
            "spotNodeHours": round(fmean(outcome.spot_seconds for outcome in self.outcomes) / 3600, 4),
            "onDemandNodeHours": round(fmean(outcome.on_demand_seconds for outcome in self.outcomes) / 3600, 4),
            "cost": None if self.cost is None else round(self.cost, 4),
        }


def compare(
    trace: Trace, choices: Iterable[Choice], times: Times, prices: Prices, steps: int | None, repeats: int
) -> list[Compared]:
    """Simulate every choice on the trace; those in which chance has a say `repeats` times."""
    compared = []
    for choice in choices:
        seeds = range(repeats if choice.head == "spot" else 1)
        outcomes = [simulate(trace, choice, times, steps, seed) for seed in seeds]
        compared.append(Compared(choice, outcomes, prices, steps))
    return compared


def combinations(base: Choice, **values: Sequence[Any]) -> list[Choice]:
    """Every combination of values of some fields of a choice, the last field changing fastest."""
    names = list(values)
    return [replace(base, **dict(zip(names, chosen, strict=True))) for chosen in product(*values.values())]
