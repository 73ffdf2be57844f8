"""The policy: train on spot nodes, wait for them, or pay for on-demand nodes, so that the deadline holds at least cost.

The guarantee is the safety net of "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (Wu et al., NSDI
2024, section 4.2): before slack falls under what a start of on-demand nodes takes, the job starts them. Above it, the
history of the markets says how slack is spent, where Uniform Progress (section 4.3) spends it evenly over time:

- Of the spot markets that have nodes, the one in which the rest of the work is expected to cost least.
- Without spot nodes, the job waits for at most its share in the slack: slack is kept for the starts after losses that
  are still expected, and what remains is divided among the outages that are still expected.
- On-demand nodes are left for spot nodes if these are expected to stay long enough to pay for both changes.

A job that has finished holds nothing (their thrifty rule).
"""

from __future__ import annotations

from typing import Final

from spotune.deadline.terms import TUNED, Choice, Decision, JobState, Market, Outlook, Switching, Tuning
from spotune.formatting import duration

HISTORY_SECONDS: Final = 48 * 3600.0
"""Seconds of the past that count for the expected stay; tuned by `benchmarks/deadline.py`."""


def decide(state: JobState, switching: Switching, tuning: Tuning = TUNED) -> Decision:
    """What to do until the next decision, at most `switching.interval` seconds later.

    Args:
        state: The work, the time and the markets.
        switching: How long changes of nodes take.
        tuning: The policy's tuned numbers.
    """
    if state.work <= 0:
        return Decision(Choice.DONE, "", Outlook.IN_TIME, "the work is done")
    if state.slack < switching.least_slack:
        return _without_slack(state, switching)
    policy = _Policy(state, switching, tuning)
    held = next((market for market in state.markets if market.name == state.holds and market.available), None)
    if held is not None:
        return policy.on_spot(held)
    return policy.on_demand() if state.on_demand else policy.without_nodes()


def _without_slack(state: JobState, switching: Switching) -> Decision:
    missing = (0.0 if state.on_demand else switching.on_demand_start) - state.slack
    if missing > 0:
        why = f"even on-demand nodes are {duration(missing)} late: set a later deadline, or suspend the job"
        return Decision(Choice.ON_DEMAND, "", Outlook.LATE, why)
    why = f"{duration(max(state.slack, 0.0))} of slack are too little for spot nodes"
    return Decision(Choice.ON_DEMAND, "", Outlook.NO_SLACK, why)


class _Policy:
    """The decisions while there is slack."""

    def __init__(self, state: JobState, switching: Switching, tuning: Tuning) -> None:
        self._now = state
        self._switching = switching
        self._tuning = tuning
        self._spare = state.slack - switching.slack_for_spot
        """Slack left after one more start on spot nodes."""

    def on_spot(self, held: Market) -> Decision:
        """Stay, unless the rest of the work is cheaper in another market, its start included."""
        best = self._best()
        if best is None or best.name == held.name or best.price >= held.price:
            return self._spot(held)
        is_cheaper = self._expected_cost(held, self._spare, 0.0) <= self._start_cost(best)
        return self._spot(held if is_cheaper else best)

    def on_demand(self) -> Decision:
        """Leave on-demand nodes only for spot nodes that are expected to save more than the changes cost."""
        best, now, times = self._best(), self._now, self._switching
        if best is not None:
            trained = min(best.expected_lifetime - times.spot_start, now.work)
            saved = (now.on_demand_price - best.price) * trained
            if saved > best.price * times.spot_start + now.on_demand_price * times.on_demand_start:
                return self._spot(best)
        return self._pay("spot nodes would not pay for the change")

    def without_nodes(self) -> Decision:
        """Take spot nodes, wait for them, or pay."""
        best, slack = self._best(), self._now.slack
        if best is not None:
            return self._spot(best)
        wait = self._longest_wait()
        if self._now.waited < wait:
            why = f"no spot nodes: waits up to {duration(wait)} for them, with {duration(slack)} of slack"
            return Decision(Choice.WAIT, "", Outlook.IN_TIME, why)
        return self._pay(f"no spot nodes for {duration(self._now.waited)}; {duration(slack)} of slack are kept")

    def _best(self) -> Market | None:
        """The available market with the least expected cost; None if there is none, or no slack for a start."""
        if self._spare < 0:
            return None
        available = [market for market in self._now.markets if market.available]
        key = lambda market: (self._start_cost(market), -market.expected_lifetime, market.name)  # noqa: E731
        return min(available, key=key, default=None)

    def _start_cost(self, market: Market) -> float:
        return self._expected_cost(market, self._spare, self._switching.spot_start)

    def _expected_cost(self, market: Market, spare: float, first_start: float) -> float:
        """Expected price of the rest of the work, begun in a market whose nodes are lost again and again.

        After each expected stay a loss costs a start, and slack for it. When slack is used up, the rest is on demand.

        Args:
            market: The market.
            spare: Slack for the starts after losses, in seconds.
            first_start: Seconds of the start with which it begins.
        """
        start, work = self._switching.spot_start, self._now.work
        lifetime = market.expected_lifetime / max(self._tuning.reserve, 1e-9)
        lifetimes = 1 + spare / start if start > 0 else work / lifetime + 1
        on_spot = min(work, lifetimes * lifetime)
        seconds = on_spot + first_start + on_spot / lifetime * start
        return (market.price * seconds + self._now.on_demand_price * (work - on_spot)) / 3600

    def _longest_wait(self) -> float:
        """Seconds to wait in this outage: its share in the slack that losses do not need."""
        now, lifetime = self._now, max((market.expected_lifetime for market in self._now.markets), default=0.0)
        losses = now.work / lifetime if lifetime > 0 else 0.0
        kept = self._tuning.reserve * losses * self._switching.spot_start
        return max(0.0, self._tuning.patience * (self._spare + now.waited - kept) / (1 + losses))

    def _spot(self, market: Market) -> Decision:
        why = f"{market.name} has spot nodes, and {duration(self._now.slack)} of slack are left"
        return Decision(Choice.SPOT, market.name, Outlook.IN_TIME, why)

    def _pay(self, why: str) -> Decision:
        return Decision(Choice.ON_DEMAND, "", Outlook.IN_TIME, why)
