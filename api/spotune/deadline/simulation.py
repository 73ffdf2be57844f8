"""A simulation of one job with a deadline on the recorded availability of spot markets.

Time passes in intervals of equal length. The availability of a market is known at the begin of an interval and holds
until its end, as in the simulations of "Can't Be Late" (NSDI 2024, section 6.1). A start takes the times of
``Switching``. A loss undoes the training since the last commit, at most ``Switching.at_risk``; a job that moves by
choice commits first. Nodes are paid by the second from their start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from spotune.deadline.history import MarketHistory
from spotune.deadline.terms import Choice, Decision, JobState, Market, Switching
from spotune.simulate.trace import Trace

Strategy = Callable[[JobState], Decision]
"""Decides once in each interval."""

ON_DEMAND: Final = "on-demand"
WAITING: Final = ""


@dataclass(frozen=True)
class PoolTrace:
    """The recorded availability of spot markets.

    Attributes:
        names: Names of the markets.
        prices: Price per hour of each, for all nodes of the job.
        on_demand_price: The same on demand.
        interval: Seconds of an interval.
        available: By interval, whether each market has nodes for the job: [interval, market].
        expected_lifetimes: By interval, the seconds that nodes of each market are expected to stay: [interval, market].
    """

    names: tuple[str, ...]
    prices: tuple[float, ...]
    on_demand_price: float
    interval: float
    available: Sequence[tuple[bool, ...]]
    expected_lifetimes: Sequence[tuple[float, ...]]

    @classmethod
    def from_traces(
        cls,
        traces: Mapping[str, Trace],
        prices: Sequence[float],
        on_demand_price: float,
        interval: float,
        window: float,
    ) -> PoolTrace:
        """The markets of several traces, by name, sampled at the begin of each interval; the shortest sets the end.

        A market has nodes for the job while its trace has any: a job may begin with `workers.min`.
        """
        count = int(min(trace.seconds for trace in traces.values()) / interval)
        columns = [sampled(trace, interval, count) for trace in traces.values()]
        return cls.observed(list(traces), prices, on_demand_price, interval, list(zip(*columns, strict=True)), window)

    def only(self, names: Collection[str]) -> PoolTrace:
        """The trace of some markets."""
        kept = [index for index, name in enumerate(self.names) if name in names]
        return replace(
            self,
            names=tuple(self.names[index] for index in kept),
            prices=tuple(self.prices[index] for index in kept),
            available=[tuple(row[index] for index in kept) for row in self.available],
            expected_lifetimes=[tuple(row[index] for index in kept) for row in self.expected_lifetimes],
        )

    @classmethod
    def observed(
        cls,
        names: Sequence[str],
        prices: Sequence[float],
        on_demand_price: float,
        interval: float,
        available: Sequence[tuple[bool, ...]],
        window: float,
    ) -> PoolTrace:
        """The trace with the stays that somebody expects who has observed it from its begin, but knows no future."""
        history, lifetimes = MarketHistory(window), []
        for index, row in enumerate(available):
            now = index * interval
            for name, is_available in zip(names, row, strict=True):
                history.observe(name, is_available, now)
            lifetimes.append(tuple(history.expected_lifetime(name, now) for name in names))
        return cls(tuple(names), tuple(prices), on_demand_price, interval, available, lifetimes)

    def markets(self, index: int) -> tuple[Market, ...]:
        """The markets in an interval."""
        rows = zip(self.names, self.prices, self.available[index], self.expected_lifetimes[index], strict=True)
        return tuple(Market(*row) for row in rows)


def sampled(trace: Trace, interval: float, count: int, nodes: int = 1) -> list[bool]:
    """Whether a trace has so many nodes, at the begin of each of `count` intervals."""
    changes, values, current = deque(trace.changes), [], 0
    for index in range(count):
        while changes and changes[0][0] <= index * interval:
            current = changes.popleft()[1]
        values.append(current >= nodes)
    return values


@dataclass
class Run:
    """The result of one simulated job.

    Attributes:
        finished_after: Seconds from its begin to its end.
        deadline: Seconds from its begin to its deadline.
        cost: Price of all nodes.
        spot_seconds: Time with spot nodes.
        on_demand_seconds: Time with on-demand nodes.
        starts: Number of starts of nodes.
        path: The market in each interval, `ON_DEMAND` or `WAITING`.
    """

    finished_after: float
    deadline: float
    cost: float
    spot_seconds: float
    on_demand_seconds: float
    starts: int
    path: list[str]

    @property
    def met(self) -> bool:
        """Whether the deadline was met."""
        return self.finished_after <= self.deadline + 1e-6

    @property
    def availability(self) -> float:
        """Share of the time in which the job had nodes."""
        return (self.spot_seconds + self.on_demand_seconds) / self.finished_after


class TraceEndedError(Exception):
    """The trace ends before the job does."""


def simulate(
    trace: PoolTrace, begin: int, work: float, deadline: float, switching: Switching, strategy: Strategy
) -> Run:
    """Simulate a job.

    Args:
        trace: The availability of the markets.
        begin: Interval in which the job begins.
        work: Seconds of training.
        deadline: Seconds from its begin.
        switching: How long starts take.
        strategy: Decides in each interval.

    Raises:
        TraceEndedError: The trace is too short.
    """
    run = Run(0.0, deadline, 0.0, 0.0, 0.0, 0, [])
    prices = dict(zip(trace.names, trace.prices, strict=True)) | {ON_DEMAND: trace.on_demand_price}
    place, starting, waited, trained = WAITING, 0.0, 0.0, 0.0
    for index in range(begin, len(trace.available)):
        markets = trace.markets(index)
        if place not in (WAITING, ON_DEMAND) and not markets[trace.names.index(place)].available:
            work += min(trained, switching.at_risk)
            place, starting, trained = WAITING, 0.0, 0.0
        left = deadline - run.finished_after
        holds = "" if place == ON_DEMAND else place
        decision = strategy(
            JobState(work, left, markets, trace.on_demand_price, holds, place == ON_DEMAND, starting, waited)
        )
        chosen = _place(decision)
        if chosen != place:
            place, trained = chosen, 0.0
            starting = {WAITING: 0.0, ON_DEMAND: switching.on_demand_start}.get(place, switching.spot_start)
            run.starts += place != WAITING
        run.path.append(place)
        seconds = trace.interval if place == WAITING else min(trace.interval, starting + work)
        run.finished_after += seconds
        waited = waited + seconds if place == WAITING else 0.0
        if place == WAITING:
            continue
        run.cost += prices[place] * seconds / 3600
        run.on_demand_seconds += seconds if place == ON_DEMAND else 0.0
        run.spot_seconds += 0.0 if place == ON_DEMAND else seconds
        started = min(starting, seconds)
        starting -= started
        work -= seconds - started
        trained += seconds - started
        if work <= 1e-6 and starting <= 0:
            return run
    raise TraceEndedError("the trace ends before the job does")


def _place(decision: Decision) -> str:
    if decision.choice is Choice.SPOT:
        return decision.market
    return ON_DEMAND if decision.choice is Choice.ON_DEMAND else WAITING
