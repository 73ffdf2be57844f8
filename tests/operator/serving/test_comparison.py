"""Comparison of a new version with the served one: figures and the sentences about them."""

from __future__ import annotations

import random

import pytest

from spotune.service import PromotionSpec
from spotune_operator.serving.comparison import compare_metric, too_many_errors, too_slow
from spotune_operator.serving.gateway_stats import Histogram, VersionCounters

BOUNDS = [0.005 * 1.3**number for number in range(20)] + [float("inf")]


def latencies(seconds: list[float]) -> Histogram:
    return Histogram({bound: sum(value <= bound for value in seconds) for bound in BOUNDS})


def version(requests: float = 100, errors: float = 0, seconds: list[float] | None = None) -> VersionCounters:
    return VersionCounters(requests, errors, latencies(seconds or []), Histogram())


@pytest.mark.parametrize(
    ("metric", "new", "old", "is_worse"),
    [
        ("loss", 1.04, 1.0, False),
        ("loss", 1.06, 1.0, True),
        ("loss", 0.5, 1.0, False),
        ("kl", 0.5, 1.0, False),
        ("kl", 1.06, 1.0, True),
        ("rewardRejected", -1.5, -1.0, False),
        ("rewardRejected", -0.94, -1.0, True),
        ("wikitext/word_perplexity", 8.0, 10.0, False),
        ("wikitext/word_perplexity", 10.6, 10.0, True),
        ("arc_easy/acc", 0.5, 0.6, True),
        ("accuracy", 0.96, 1.0, False),
        ("accuracy", 0.94, 1.0, True),
        ("accuracy", 1.5, 1.0, False),
        ("reward", -1.04, -1.0, False),
        ("reward", -1.06, -1.0, True),
    ],
)
def test_lower_values_are_better_for_losses_and_perplexities_and_higher_ones_otherwise(
    metric: str, new: float, old: float, is_worse: bool
) -> None:
    condition = PromotionSpec(metric=metric, not_worse_by=0.05)
    assert compare_metric(condition, "job", {metric: new}, {metric: old}).is_worse is is_worse


def test_a_metric_is_not_compared_if_none_is_asked_for_or_the_served_version_has_none() -> None:
    assert not compare_metric(PromotionSpec(), "job", {"loss": 9.0}, {"loss": 1.0}).is_worse
    condition = PromotionSpec(metric="loss")
    assert compare_metric(condition, "job", {"loss": 9.0}, {}) == compare_metric(PromotionSpec(), "job", {}, {})
    assert compare_metric(condition, "job", {}, {"loss": 1.0}).is_missing


def test_errors_count_as_soon_as_the_missing_requests_cannot_make_up_for_them() -> None:
    condition = PromotionSpec(max_error_rate=0.1, min_requests=20)
    assert not too_many_errors(condition, version(2, errors=2), version())
    assert too_many_errors(condition, version(3, errors=3), version())
    assert not too_many_errors(condition, version(3, errors=3), version(100, errors=10))


def test_a_few_slow_requests_may_be_chance_and_many_are_not() -> None:
    condition = PromotionSpec(not_worse_by=0.05, min_requests=20)
    old = version(seconds=[0.02] * 100)
    assert not too_slow(condition, version(seconds=[0.02] * 9 + [0.09] * 11), old)
    assert too_slow(condition, version(seconds=[0.02] * 3 + [0.09] * 17), old)
    assert not too_slow(condition, version(seconds=[0.09] * 19), old), "too few requests"


def test_equal_versions_are_seldom_rolled_back_and_slow_ones_nearly_always() -> None:
    """Of 400 comparisons of equal versions about 5 % of those without a tolerance may fail."""
    random.seed(1)
    condition = PromotionSpec(not_worse_by=0.05, min_requests=20)

    def drawn(factor: float, number: int) -> VersionCounters:
        return version(seconds=[factor * 0.05 * random.lognormvariate(0, 0.6) for _ in range(number)])

    def rolled_back(factor: float) -> int:
        return sum(bool(too_slow(condition, drawn(factor, 20), drawn(1.0, 100))) for _ in range(400))

    assert rolled_back(1.0) < 30
    assert rolled_back(3.0) > 380
