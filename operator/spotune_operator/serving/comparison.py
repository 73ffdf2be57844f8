"""Compares a new version of a model with the served one: metric, error rate, and latency. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from spotune.job.training.metric import lower_is_better
from spotune.service import PromotionSpec
from spotune_operator.serving.gateway_stats import Histogram, VersionCounters

_ONE_SIDED_95: Final = 1.645
"""Quantile of the normal distribution: chance alone exceeds it once in twenty times."""


@dataclass(frozen=True)
class MetricComparison:
    """The comparison of the job's metric.

    Attributes:
        message: What is wrong; empty if nothing is.
        is_worse: Whether the new version is worse than allowed.
        is_missing: Whether the job does not report the metric.
    """

    message: str = ""
    is_worse: bool = False
    is_missing: bool = False


def compare_metric(
    condition: PromotionSpec, job: str, candidate: Mapping[str, float], served: Mapping[str, float]
) -> MetricComparison:
    """Compare the metric of ``promoteIf``. A served version without it, such as one from a claim, is not compared.

    Args:
        condition: ``spec.rollout.promoteIf``.
        job: Name of the FinetuneJob.
        candidate: Metrics of the new version.
        served: Metrics of the served version.
    """
    name = condition.metric
    if not name:
        return MetricComparison()
    if name not in candidate:
        reported = ", ".join(sorted(candidate)) or "none: give it dataset.eval"
        message = (
            f"spec.rollout.promoteIf.metric: the FinetuneJob {job} does not report {name}; its metrics are {reported}"
        )
        return MetricComparison(message, is_missing=True)
    if name not in served:
        return MetricComparison()
    new, old = candidate[name], served[name]
    allowed = abs(old) * condition.not_worse_by
    if new <= old + allowed if lower_is_better(name) else new >= old - allowed:
        return MetricComparison()
    return MetricComparison(f"{name} {new:.4g} against {old:.4g}", is_worse=True)


def too_many_errors(condition: PromotionSpec, candidate: VersionCounters, served: VersionCounters) -> str:
    """Why the error rate is too high; empty if it is not.

    Before there are enough requests, the missing ones count as successful: more of them cannot save the candidate.
    """
    counted = max(candidate.requests, condition.min_requests)
    if candidate.errors / counted <= served.error_rate + condition.max_error_rate:
        return ""
    return (
        f"error rate {_percent(candidate.error_rate)} against {_percent(served.error_rate)} "
        f"over {candidate.requests:.0f} requests"
    )


def too_slow(condition: PromotionSpec, candidate: VersionCounters, served: VersionCounters) -> str:
    """Why the latency is too high; empty if it is not, or if a version has fewer than ``minRequests`` requests."""
    for name, new, old in (
        ("to the first token", candidate.first_token, served.first_token),
        ("per token", candidate.token, served.token),
    ):
        if min(new.count, old.count) >= condition.min_requests and _is_slower(new, old, condition.not_worse_by):
            return f"median time {name} {_milliseconds(new)} against {_milliseconds(old)} over {new.count:.0f} requests"
    return ""


def _is_slower(new: Histogram, old: Histogram, allowed: float) -> bool:
    """Whether the median is higher than allowed, and by more than chance explains.

    Half of the values lie above a median. The sign test asks whether significantly more of the new ones lie above the
    allowed limit, which is itself known only as well as the number of old values allows.
    """
    limit = (old.median() or 0.0) * (1 + allowed)
    deviation = 0.5 * math.sqrt(1 / new.count + 1 / old.count)
    return (new.median() or 0.0) > limit and new.fraction_above(limit) > 0.5 + _ONE_SIDED_95 * deviation


def describe(candidate: VersionCounters, served: VersionCounters) -> str:
    """The figures of both versions for people."""
    if not candidate.requests:
        return "it was not compared: it had no requests"
    text = (
        f"error rate {_percent(candidate.error_rate)} against {_percent(served.error_rate)} "
        f"over {candidate.requests:.0f} requests"
    )
    if candidate.first_token.count and served.first_token.count:
        first = f"{_milliseconds(candidate.first_token)} against {_milliseconds(served.first_token)}"
        text += f", median time to the first token {first}"
    return text


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def _milliseconds(histogram: Histogram) -> str:
    return f"{1000 * (histogram.median() or 0.0):.3g} ms"
