"""How long the nodes of a market are expected to stay."""

from __future__ import annotations

from spotune.deadline.history import MarketHistory

HOUR = 3600.0


def test_stay_is_time_available_over_losses_with_an_hour_in_advance() -> None:
    history = MarketHistory(window=48 * HOUR)
    assert history.expected_lifetime("a", 0.0) == HOUR
    history.observe("a", True, 0.0)
    assert history.expected_lifetime("a", 5 * HOUR) == 6 * HOUR
    history.observe("a", False, 5 * HOUR)
    assert history.expected_lifetime("a", 9 * HOUR) == 3 * HOUR
    history.observe("a", True, 10 * HOUR)
    assert history.expected_lifetime("a", 12 * HOUR) == (5 + 2 + 1) * HOUR / 2


def test_what_is_older_than_the_window_does_not_count() -> None:
    history = MarketHistory(window=10 * HOUR)
    for begin in (0.0, 4 * HOUR):
        history.observe("a", True, begin)
        history.observe("a", False, begin + 3 * HOUR)
    assert history.expected_lifetime("a", 8 * HOUR) == (6 + 1) * HOUR / 3
    assert history.expected_lifetime("a", 15 * HOUR) == (2 + 1) * HOUR / 2
    assert history.expected_lifetime("a", 20 * HOUR) == HOUR
