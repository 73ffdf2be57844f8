"""The policies that `benchmarks/deadline.py` compares ours with, and the offline optimum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spotune.deadline.simulation import PoolTrace
from spotune.deadline.terms import Choice, Decision, JobState, Outlook, Switching


def _decision(choice: Choice, market: str = "") -> Decision:
    return Decision(choice, market, Outlook.IN_TIME, "")


def on_demand_only(_: JobState) -> Decision:
    """On-demand nodes from begin to end."""
    return _decision(Choice.ON_DEMAND)


@dataclass
class Greedy:
    """Spot nodes of the cheapest market while there are any; on-demand nodes from the last moment on, to the end.

    This is the greedy policy of "Can't Be Late" (section 4.1), over one market or several. Of markets with the same
    price it takes the first.
    """

    switching: Switching

    def __call__(self, state: JobState) -> Decision:
        """The decision of this interval."""
        switching = self.switching
        if state.on_demand or state.slack < switching.least_slack:
            return _decision(Choice.ON_DEMAND)
        if any(market.name == state.holds for market in state.markets):
            return _decision(Choice.SPOT, state.holds)
        available = [market for market in state.markets if market.available]
        if available and state.slack >= switching.slack_for_spot:
            return _decision(Choice.SPOT, min(available, key=lambda market: market.price).name)
        return _decision(Choice.WAIT)


@dataclass
class UniformProgress:
    """Uniform Progress of "Can't Be Late" (Wu et al., NSDI 2024, section 4.3), on a single market.

    With c(t) the progress, e(t) = t C / R the expected one, C all work and R the time to the deadline at the begin:

    - Uniform progress: without spot nodes and c(t) < e(t), take on-demand nodes.
    - Taking risks: take spot nodes when they are available, and stay until they are lost.
    - Hysteresis: stay on on-demand nodes until c(t) >= e(t + 2 d), with d the changeover delay.
    - Safety net: below a slack of 2 d without spot nodes, take on-demand nodes to the end.

    The safety net has our exact condition, which lets it use spot nodes a little longer than 2 d does.
    """

    switching: Switching
    work: float
    deadline: float
    _is_last: bool = False

    def __call__(self, state: JobState) -> Decision:
        """The decision of this interval."""
        switching = self.switching
        if self._is_last or state.slack < switching.least_slack:
            self._is_last = True
            return _decision(Choice.ON_DEMAND)
        (market,) = state.markets
        if state.holds:
            return _decision(Choice.SPOT, market.name)
        progress, elapsed = self.work - state.work, self.deadline - state.to_deadline
        delay = switching.spot_start + switching.on_demand_start
        if state.on_demand and progress < self._expected(elapsed + delay):
            return _decision(Choice.ON_DEMAND)
        if market.available and state.slack >= switching.slack_for_spot:
            return _decision(Choice.SPOT, market.name)
        is_behind = progress < self._expected(elapsed)
        return _decision(Choice.ON_DEMAND if is_behind or state.on_demand else Choice.WAIT)

    def _expected(self, elapsed: float) -> float:
        return elapsed * self.work / self.deadline


def optimum(trace: PoolTrace, begin: int, work: int, deadline: int, switching: Switching) -> float:
    """The least cost with which the job can end by its deadline, for somebody who knows the whole trace.

    Dynamic programming over intervals, backwards from the deadline. The state is the interval, where the job is (no
    nodes, one of the markets, on demand), how many intervals of the start are left, and the intervals of work left.
    In each interval the job stays where it is, if the market is still available, starts anywhere that is available,
    or holds nothing; the same moves, prices and start times as in `spotune.deadline.simulation`.

    Args:
        trace: The availability of the markets.
        begin: Interval in which the job begins.
        work: Intervals of training.
        deadline: Intervals from the begin to the deadline.
        switching: Start times; whole multiples of the interval.
    """
    spot_start, on_demand_start = (
        _whole(seconds / trace.interval) for seconds in (switching.spot_start, switching.on_demand_start)
    )
    price = np.array([*trace.prices, trace.on_demand_price]) * trace.interval / 3600
    places, longest = len(price), max(spot_start, on_demand_start)
    # Cost to go by [place, intervals of the start left, intervals of work left], and of holding nothing.
    held = np.full((places, longest + 1, work + 1), np.inf)
    idle = np.full(work + 1, np.inf)
    held[:, :, 0] = idle[0] = 0.0
    first = np.array([spot_start] * (places - 1) + [on_demand_start])
    for index in range(begin + deadline - 1, begin - 1, -1):
        available = np.array([*trace.available[index], True])
        used = np.empty_like(held)  # cost to go of having nodes in this interval
        used[:, 0, 1:] = price[:, None] + held[:, 0, :-1]
        used[:, 1:, :] = price[:, None, None] + held[:, :-1, :]
        used[~available] = np.inf
        used[:, :, 0] = 0.0
        started = used[np.arange(places), first]
        idle = np.minimum(idle, started.min(axis=0))
        held = np.minimum(used, idle)
    return float(idle[work])


def _whole(number: float) -> int:
    if abs(number - round(number)) > 1e-9:
        raise ValueError(f"start times must be whole multiples of the interval, not {number} of it")
    return round(number)
