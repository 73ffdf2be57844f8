"""The plan of a mixture: weights, temperature, stages by steps, and the limit of passes over a source."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from spotune.job import FinetuneJob
from spotune_trainer.data.sampling.mixture_plan import (
    MixedSource,
    MixturePlan,
    exact_weight,
    plan_mixture,
    temperature_weights,
)
from tests.trainer.support.tiny import make_job


def mixture_job(*sources: dict[str, Any], temperature: float | None = None, **training: Any) -> FinetuneJob:
    mixture = [{"name": f"s{n}", "train": {"source": f"/s{n}"}, **source} for n, source in enumerate(sources)]
    dataset = {"train": None, "eval": None, "mixture": mixture, "mixtureTemperature": temperature}
    return make_job("/model", dataset=dataset, training={"epochs": None, "globalBatchSize": 10, **training})


def samples(job: FinetuneJob, sizes: list[int], step: int) -> list[int]:
    return list(plan_mixture(job, sizes).samples_by_source(step).values())


def test_weights_are_shares_of_the_samples() -> None:
    job = mixture_job({"weight": 0.7}, {"weight": 0.2}, {"weight": 0.1}, maxSteps=100)
    assert samples(job, [5000, 5000, 5000], 100) == [700, 200, 100]
    assert samples(job, [5000, 5000, 5000], 7) == [49, 14, 7]


def test_a_weight_is_the_decimal_number_that_was_written() -> None:
    assert exact_weight(0.1) == Fraction(1, 10)
    assert exact_weight(3) == 3
    assert exact_weight(1e-4) == Fraction(1, 10000)


def test_shares_are_those_of_the_sizes_without_weights_and_an_epoch_takes_each_sample_once() -> None:
    job = mixture_job({}, {}, epochs=2)
    plan = plan_mixture(job, [81, 14])
    assert plan.steps_per_epoch == 10
    assert plan.samples_before(10) == 95, "the last step of an epoch has the rest"
    assert plan.samples_by_source(10) == {"s0": 81, "s1": 14}
    assert plan.samples_by_source(20) == {"s0": 162, "s1": 28}


def test_a_temperature_makes_shares_more_equal() -> None:
    sizes = [1000, 10]
    assert temperature_weights(sizes, 1) == sizes
    assert temperature_weights([10000, 100], 2) == [100, 10]
    assert samples(mixture_job({}, {}, temperature=2.0, maxSteps=11), [1000, 10], 11) == [100, 10]
    shares = [weights[0] / sum(weights) for weights in (temperature_weights(sizes, t) for t in (1, 2, 5, 1000))]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(0.5, abs=0.01)


def test_weights_of_a_temperature_do_not_depend_on_the_machine() -> None:
    """Pinned: a job that resumes on another machine must not change its samples."""
    assert temperature_weights([80_123, 5_431], 3.3) == [Fraction("30.6187"), Fraction("13.5451")]


def test_sources_change_with_the_steps() -> None:
    job = mixture_job(
        {"weight": 1, "untilStep": 20}, {"weight": 1}, {"weight": 3, "fromStep": 10, "untilStep": 15}, maxSteps=40
    )
    sizes = [500, 500, 500]
    assert samples(job, sizes, 10) == [50, 50, 0]
    assert samples(job, sizes, 15) == [60, 60, 30]
    assert samples(job, sizes, 20) == [85, 85, 30]
    assert samples(job, sizes, 40) == [85, 285, 30]


def test_a_step_without_a_source_is_refused() -> None:
    sources = [MixedSource("a", 10, Fraction(1), until_step=3), MixedSource("b", 10, Fraction(1), from_step=4)]
    with pytest.raises(ValueError, match="no source for the steps after step 3"):
        MixturePlan(sources, 2)


def test_a_source_that_would_be_repeated_too_often_is_refused_with_the_numbers() -> None:
    sizes = [5000, 100]
    expected = (
        r"s1: the run of 50 steps needs 250 samples of this source, 2\.50 passes over its 100, and its maxEpochs is 2: "
        "lower its weight, shorten the run, or raise maxEpochs"
    )
    with pytest.raises(ValueError, match=expected):
        plan_mixture(mixture_job({"weight": 1}, {"weight": 1, "maxEpochs": 2}, maxSteps=50), sizes)
    plan_mixture(mixture_job({"weight": 1}, {"weight": 1, "maxEpochs": 2}, maxSteps=40), sizes)
    plan_mixture(mixture_job({"weight": 1}, {"weight": 1}, maxSteps=5000), sizes)


def test_every_source_may_be_limited_to_one_pass_in_an_epoch_by_size() -> None:
    plan_mixture(mixture_job({"maxEpochs": 1}, {"maxEpochs": 1}, epochs=1), [81, 14])


def test_the_description_has_shares_samples_and_passes() -> None:
    plan = plan_mixture(mixture_job({"weight": 3}, {"weight": 1, "fromStep": 10}, maxSteps=20), [1000, 20])
    assert list(plan.describe(20)) == [
        "s0: 87.50% of the samples of the run: 175, 0.17 passes over 1,000",
        "s1: 12.50% of the samples of the run in steps 11 to 20: 25, 1.25 passes over 20",
    ]
