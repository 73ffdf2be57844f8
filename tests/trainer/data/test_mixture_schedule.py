"""Properties of the sample schedule of a mixture, a pure function of its sources, seed and step."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import accumulate

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spotune_trainer.data.mixture_schedule import MixtureSchedule
from spotune_trainer.data.sampling.mixture_plan import MixedSource, MixturePlan
from spotune_trainer.data.schedule import SampleSchedule

Source = tuple[list[int], int]
"""Shard sizes and weight."""
sources = st.lists(
    st.tuples(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 9)), min_size=1, max_size=4
)


def schedule(given: list[Source], batch: int, seed: int = 7, steps: tuple[int, int] = (0, 0)) -> MixtureSchedule:
    """A schedule whose second source, if there are several, is used from and until the `steps`."""
    orders = [SampleSchedule(sizes, batch, seed) for sizes, _ in given]
    mixed = [
        MixedSource(str(n), order.num_samples, Fraction(weight), *(steps if n == 1 else (0, 0)))
        for n, (order, (_, weight)) in enumerate(zip(orders, given, strict=True))
    ]
    first_ids = [0, *accumulate(sum(sizes) for sizes, _ in given)][:-1]
    return MixtureSchedule(MixturePlan(mixed, batch), orders, first_ids)


@settings(deadline=None, max_examples=40)
@given(sources, st.integers(1, 30), st.integers(0, 12))
def test_a_step_does_not_depend_on_earlier_calls(given: list[Source], batch: int, step: int) -> None:
    walked = schedule(given, batch, steps=(2, 9))
    for earlier in range(step):
        walked.sample_ids(earlier)
    assert np.array_equal(walked.sample_ids(step), schedule(given, batch, steps=(2, 9)).sample_ids(step))


@settings(deadline=None, max_examples=40)
@given(sources, st.integers(1, 30), st.integers(1, 12))
def test_the_samples_of_the_steps_are_those_that_the_plan_counts(given: list[Source], batch: int, steps: int) -> None:
    mixture = schedule(given, batch, steps=(2, 9))
    ids = np.concatenate([mixture.sample_ids(step) for step in range(steps)])
    assert len(ids) == mixture.samples_before(steps)
    stops = list(accumulate(sum(sizes) for sizes, _ in given))
    found = Counter(np.searchsorted(stops, ids, side="right").tolist())
    assert {name: found[int(name)] for name in mixture.samples_by_source(steps)} == mixture.samples_by_source(steps)


@settings(deadline=None, max_examples=40)
@given(sources, st.integers(1, 30), st.integers(1, 20))
def test_a_source_is_used_up_before_a_sample_of_it_comes_again(given: list[Source], batch: int, steps: int) -> None:
    mixture = schedule(given, batch, steps=(2, 9))
    ids = np.concatenate([mixture.sample_ids(step) for step in range(steps)]).tolist()
    first = 0
    for sizes, _ in given:
        times = Counter(each for each in ids if first <= each < first + sum(sizes))
        counts = [times[each] for each in range(first, first + sum(sizes))]
        assert max(counts) - min(counts) <= 1
        first += sum(sizes)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 30), st.integers(0, 12))
def test_a_mixture_of_one_source_trains_on_the_samples_of_the_dataset(sizes: list[int], batch: int, step: int) -> None:
    alone = SampleSchedule(sizes, batch, 7)
    assert np.array_equal(schedule([(sizes, 3)], batch).sample_ids(step), alone.sample_ids(step))


@settings(deadline=None, max_examples=30)
@given(sources, st.integers(1, 30), st.integers(0, 3))
def test_an_epoch_by_size_has_every_sample_once(given: list[Source], batch: int, epoch: int) -> None:
    mixture = schedule([(sizes, sum(sizes)) for sizes, _ in given], batch)
    first = epoch * mixture.steps_per_epoch
    ids = [int(i) for step in range(first, first + mixture.steps_per_epoch) for i in mixture.sample_ids(step)]
    assert sorted(ids) == list(range(mixture.num_samples))


def test_the_samples_are_pinned() -> None:
    """A job that resumes with a newer release must train on the samples that the old one would have trained on."""
    mixture = schedule([([6, 6], 2), ([5], 1)], 6, steps=(1, 3))
    assert [mixture.sample_ids(step).tolist() for step in range(4)] == [
        [10, 5, 3, 8, 2, 0],
        [4, 14, 1, 7, 12, 6],
        [9, 16, 11, 4, 13],
        [6, 9, 11, 0, 5, 10],
    ]
