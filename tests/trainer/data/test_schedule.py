"""Properties of the sample schedule, a pure function of shard sizes, seed and step."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotune_trainer.data.schedule import SampleSchedule, held_out_ids, split_into_micro_batches

shard_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def epoch_ids(schedule: SampleSchedule, epoch: int) -> list[int]:
    first = epoch * schedule.steps_per_epoch
    return [
        int(sample) for step in range(first, first + schedule.steps_per_epoch) for sample in schedule.sample_ids(step)
    ]


@settings(deadline=None, max_examples=60)
@given(shard_sizes, st.integers(1, 50), st.integers(0, 2**31), st.integers(0, 3), st.integers(0, 60))
def test_every_sample_is_used_exactly_once_per_epoch(
    sizes: list[int], batch: int, seed: int, epoch: int, block: int
) -> None:
    schedule = SampleSchedule(sizes, batch, seed, block)
    assert schedule.steps_per_epoch == math.ceil(sum(sizes) / batch)
    assert sorted(epoch_ids(schedule, epoch)) == list(range(sum(sizes)))


@settings(deadline=None, max_examples=60)
@given(shard_sizes, st.integers(1, 30), st.integers(1, 7), st.integers(1, 6), st.integers(0, 20))
def test_a_step_has_the_same_samples_at_any_world_size(
    sizes: list[int], batch: int, micro_batch: int, world_size: int, step: int
) -> None:
    ids = SampleSchedule(sizes, batch, 42).sample_ids(step)
    every = split_into_micro_batches(ids, micro_batch)
    by_rank = [every[rank::world_size] for rank in range(world_size)]
    merged = {
        g: part for rank, own in enumerate(by_rank) for g, part in zip(range(rank, 99, world_size), own, strict=False)
    }
    assert np.array_equal(np.concatenate([merged[g] for g in sorted(merged)]), ids)
    assert all(len(part) == micro_batch for part in every[:-1])


@settings(deadline=None, max_examples=40)
@given(shard_sizes, st.integers(1, 30), st.integers(0, 20))
def test_a_step_does_not_depend_on_earlier_calls(sizes: list[int], batch: int, step: int) -> None:
    walked = SampleSchedule(sizes, batch, 1)
    for earlier in range(step):
        walked.sample_ids(earlier)
    assert np.array_equal(walked.sample_ids(step), SampleSchedule(sizes, batch, 1).sample_ids(step))


def test_a_step_reads_only_the_shards_of_a_block() -> None:
    schedule = SampleSchedule([100] * 50, 20, seed=3)
    touched = [len(np.unique(schedule.sample_ids(step) // 100)) for step in range(schedule.steps_per_epoch)]
    assert max(touched) <= 6  # a block spans 3 to 5 shards and may start inside one
    assert np.mean(touched) > 2  # samples of several shards are mixed


def test_epochs_and_seeds_differ_in_order() -> None:
    schedule, other = SampleSchedule([50] * 4, 10, seed=1), SampleSchedule([50] * 4, 10, seed=5)
    assert epoch_ids(schedule, 0) != epoch_ids(schedule, 1)
    assert epoch_ids(schedule, 0) != epoch_ids(other, 0)


def test_the_last_step_of_an_epoch_may_be_smaller() -> None:
    schedule = SampleSchedule([10, 13], 10, seed=0)
    assert [len(schedule.sample_ids(step)) for step in range(6)] == [10, 10, 3, 10, 10, 3]
    assert [schedule.epoch_of(step) for step in (0, 2, 3)] == [0, 0, 1]


@pytest.mark.parametrize(("epochs", "max_steps", "steps"), [(2, None, 6), (None, 5, 5), (2, 5, 5), (2, 99, 6)])
def test_max_steps_limits_the_epochs(epochs: int | None, max_steps: int | None, steps: int) -> None:
    assert SampleSchedule([23], 10, seed=0).total_steps(epochs, max_steps) == steps


def test_a_block_smaller_than_a_shard_still_shuffles_the_shard() -> None:
    ids = epoch_ids(SampleSchedule([100, 100], 10, seed=0, shuffle_block_size=1), 0)
    assert ids[:100] != sorted(ids[:100])


@settings(deadline=None)
@given(st.integers(2, 500), st.floats(0.01, 0.5), st.integers(0, 2**40))
def test_held_out_samples_are_never_trained_on(samples: int, fraction: float, seed: int) -> None:
    held = held_out_ids(samples, fraction, seed)
    assert len(held) == len(set(held.tolist())) == max(1, round(fraction * samples))
    schedule = SampleSchedule([samples], 7, seed=0, excluded=held)
    trained = epoch_ids(schedule, 0)
    assert sorted([*trained, *held.tolist()]) == list(range(samples))


def test_held_out_samples_depend_only_on_the_seed() -> None:
    assert held_out_ids(12, 0.25, 1).tolist() == held_out_ids(12, 0.25, 1).tolist()
    assert held_out_ids(1000, 0.1, 1).tolist() != held_out_ids(1000, 0.1, 2).tolist()
    # Pinned: a job that resumes with a newer release must not evaluate on what it trained on.
    assert held_out_ids(20, 0.2, 42).tolist() == [11, 12, 13, 18]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 0.99])
def test_a_fraction_that_leaves_no_samples_is_rejected(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction|nothing to train on"):
        held_out_ids(10, fraction, 0)


def test_an_empty_dataset_and_an_empty_batch_are_rejected() -> None:
    with pytest.raises(ValueError, match="no samples"):
        SampleSchedule([], 4, seed=0)
    with pytest.raises(ValueError, match="no samples"):
        SampleSchedule([2], 4, seed=0, excluded=np.array([0, 1]))
    with pytest.raises(ValueError, match="at least 1"):
        SampleSchedule([2], 0, seed=0)
    with pytest.raises(ValueError, match="from 0"):
        SampleSchedule([2], 1, seed=0).sample_ids(-1)


def test_only_two_epochs_are_kept_in_memory() -> None:
    schedule = SampleSchedule([10], 10, seed=0)
    orders = [schedule.epoch_order(epoch) for epoch in range(3)]
    assert schedule.epoch_order(2) is orders[2]
    assert schedule.epoch_order(0) is not orders[0]
    assert not list(islice((order for order in orders if order.flags.writeable), 1))
