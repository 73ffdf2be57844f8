"""What the policy knows and what it answers: times, prices, markets, state and decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from spotune.resize.times import scaled_step_seconds


def work_seconds(steps: float, step_seconds: Mapping[int, float], workers: int) -> float:
    """Seconds of training that are left.

    Args:
        steps: Steps left.
        step_seconds: Measured seconds per step by number of workers; other numbers scale inversely from the nearest.
        workers: Number of workers that will train.
    """
    return steps * scaled_step_seconds(step_seconds, workers)


@dataclass(frozen=True)
class Switching:
    """How long a change of nodes takes, in seconds. This is the changeover delay d of "Can't Be Late".

    Attributes:
        spot_start: From the request of spot nodes that are there to the next new step: nodes, pods, restore.
        on_demand_start: The same for on-demand nodes. The guarantee holds while they come within this time.
        interval: Longest time between two decisions, with the time until a loss is noticed.
        at_risk: Longest training that a loss without notice undoes: the time between two commits. 0 if the start
            times contain it.
    """

    spot_start: float
    on_demand_start: float
    interval: float
    at_risk: float = 0.0

    @property
    def least_slack(self) -> float:
        """Slack below which only on-demand nodes keep the deadline.

        Until the next decision, spot nodes or waiting may cost `interval` and `at_risk`; then on-demand nodes must
        still be in time. This is the safety net of "Can't Be Late" (section 4.2), with start times of their own.
        """
        return self.on_demand_start + self.interval + self.at_risk

    @property
    def slack_for_spot(self) -> float:
        """Slack that a start on spot nodes needs: they may be lost right after it. The 2d of "Can't Be Late"."""
        return self.spot_start + self.least_slack


@dataclass(frozen=True)
class Tuning:
    """The two numbers of the policy that are tuned, by `benchmarks/deadline.py` on windows of a trace.

    Attributes:
        reserve: Losses to prepare for, in multiples of the expected ones.
        patience: Longest wait for spot nodes, in multiples of the fair share of this outage in the slack.
    """

    reserve: float
    patience: float


TUNED: Final = Tuning(reserve=2.0, patience=2.0)


@dataclass(frozen=True)
class Market:
    """A market for spot nodes: a zone, a pool, or a type of GPU in one.

    Attributes:
        name: Its name.
        price: Price per hour of all nodes of the job.
        available: Whether it has nodes for the job now.
        expected_lifetime: Seconds that nodes of this market are expected to stay.
    """

    name: str
    price: float
    available: bool
    expected_lifetime: float


@dataclass(frozen=True)
class JobState:
    """The input of a decision.

    Attributes:
        work: Seconds of training left on the nodes that the job is to have.
        to_deadline: Seconds until the deadline; negative after it.
        markets: The spot markets.
        on_demand_price: Price per hour of all nodes of the job on demand.
        holds: Name of the spot market whose nodes the job has; empty without spot nodes.
        on_demand: Whether the job has on-demand nodes.
        starting: Seconds until nodes that the job has train; 0 once they do.
        waited: Seconds that the job has waited for spot nodes since it last had nodes.
    """

    work: float
    to_deadline: float
    markets: tuple[Market, ...]
    on_demand_price: float
    holds: str = ""
    on_demand: bool = False
    starting: float = 0.0
    waited: float = 0.0

    @property
    def slack(self) -> float:
        """Seconds that may still pass without training."""
        return self.to_deadline - self.work - self.starting


class Choice(StrEnum):
    """Where the job trains until the next decision."""

    SPOT = "spot"
    WAIT = "wait"
    ON_DEMAND = "on-demand"
    DONE = "done"


class Outlook(StrEnum):
    """Whether the deadline holds. The values are reasons of the condition ``DeadlineAtRisk``."""

    IN_TIME = "InTime"
    """There is slack for spot nodes."""
    NO_SLACK = "NoSlackLeft"
    """Only on-demand nodes keep the deadline."""
    LATE = "TooLate"
    """Not even on-demand nodes keep the deadline."""


@dataclass(frozen=True)
class Decision:
    """What to do now, and why.

    Attributes:
        choice: Where to train.
        market: Name of the spot market; empty for other choices.
        outlook: Whether the deadline holds.
        reason: One sentence for people.
    """

    choice: Choice
    market: str
    outlook: Outlook
    reason: str
