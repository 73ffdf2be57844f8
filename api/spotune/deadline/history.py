"""The observed history of spot markets: how long their nodes stay, and how long they are gone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_PRIOR_LIFETIME: float = 3600.0
"""Seconds of availability that every market is given in advance: a market that was never lost has no mean."""


def expected_lifetime(available: float, losses: int) -> float:
    """Seconds that nodes are expected to stay.

    This is the maximum-likelihood estimate of the mean of exponential spells of which some are still going on (total
    time at risk over the number of events), with one loss in `_PRIOR_LIFETIME` before the first observation.

    Args:
        available: Seconds for which nodes were there.
        losses: How often they were lost.
    """
    return (available + _PRIOR_LIFETIME) / (losses + 1)


@dataclass
class _Spells:
    """Of one market: its state, since when, and the earlier spells of availability as (begin, end) in seconds."""

    available: bool = False
    since: float = 0.0
    lifetimes: deque[tuple[float, float]] = field(default_factory=deque)


class MarketHistory:
    """Which markets were available when, over a sliding window.

    Args:
        window: Seconds of the past that count; older spells are forgotten, because markets change by the day.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._markets: dict[str, _Spells] = {}

    def observe(self, market: str, available: bool, now: float) -> None:
        """Record whether a market is available at a point in time, in seconds; times do not go backwards."""
        spells = self._markets.get(market)
        if spells is None:
            self._markets[market] = _Spells(available, now)
        elif spells.available != available:
            if not available:
                spells.lifetimes.append((spells.since, now))
            spells.available, spells.since = available, now

    def expected_lifetime(self, market: str, now: float) -> float:
        """Seconds that nodes of a market are expected to stay, by time available and losses in the window."""
        spells = self._markets.get(market)
        if spells is None:
            return expected_lifetime(0.0, 0)
        begin = now - self._window
        while spells.lifetimes and spells.lifetimes[0][1] <= begin:
            spells.lifetimes.popleft()
        available = sum(end - max(start, begin) for start, end in spells.lifetimes)
        if spells.available:
            available += now - max(spells.since, begin)
        return expected_lifetime(available, len(spells.lifetimes))
