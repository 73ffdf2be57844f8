"""When checkpoints are due, on fake time."""

from __future__ import annotations

import pytest

from spotune.plan.checkpoint_interval import (
    MINIMUM_INTERVAL_SECONDS,
    SECONDS_TO_PREEMPTION,
    checkpoint_interval_seconds,
    mean_seconds_between_failures,
    seconds_to_preemption,
)
from spotune.units.durations import Duration
from spotune_trainer.checkpoint.policy import CommitPolicy


class Clock:
    """Seconds that a test advances by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_number_of_steps_ignores_the_time() -> None:
    clock = Clock()
    policy = CommitPolicy(5, clock=clock)
    clock.now += 1e6
    assert [step for step in range(1, 16) if policy.due(step)] == [5, 10, 15]


def test_a_duration_counts_from_the_start_of_the_last_commit() -> None:
    clock = Clock()
    policy = CommitPolicy(Duration("2m"), clock=clock)
    clock.now += 119
    assert not policy.due(7)
    clock.now += 1
    assert policy.due(8)
    policy.commit_started()
    clock.now += 30
    policy.commit_finished(stall_seconds=1, seconds=30)
    clock.now += 89
    assert not policy.due(9)
    clock.now += 1
    assert policy.due(10)


@pytest.mark.parametrize(
    ("stall_seconds", "world_size"), [(0.01, 1), (0.01, 64), (0.5, 1), (0.5, 8), (8.0, 8), (8.0, 64), (600.0, 1)]
)
def test_auto_follows_dalys_formula(stall_seconds: float, world_size: int) -> None:
    clock = Clock()
    policy = CommitPolicy("auto", world_size, clock=clock)
    clock.now += MINIMUM_INTERVAL_SECONDS - 0.1
    assert not policy.due(1)
    clock.now += 0.2
    assert policy.due(2)
    policy.commit_started()
    policy.commit_finished(stall_seconds, stall_seconds)
    failures = mean_seconds_between_failures(SECONDS_TO_PREEMPTION, world_size)
    clock.now += checkpoint_interval_seconds(stall_seconds, failures) - 0.1
    assert not policy.due(3)
    clock.now += 0.2
    assert policy.due(4)


def test_more_workers_commit_more_often() -> None:
    clock = Clock()
    few, many = CommitPolicy("auto", 1, clock=clock), CommitPolicy("auto", 64, clock=clock)
    for policy in (few, many):
        policy.commit_started()
        policy.commit_finished(stall_seconds=2.0, seconds=2.0)
    clock.now += 60
    assert (few.due(1), many.due(1)) == (False, True)


def test_the_interval_is_never_shorter_than_a_commit_takes() -> None:
    clock = Clock()
    policy = CommitPolicy("auto", 64, clock=clock)
    policy.commit_started()
    policy.commit_finished(stall_seconds=0.01, seconds=240.0)
    clock.now += 239
    assert not policy.due(1)
    clock.now += 1
    assert policy.due(2)


def test_frequent_preemptions_shorten_the_interval() -> None:
    assert seconds_to_preemption(0.0, 0) == SECONDS_TO_PREEMPTION
    assert seconds_to_preemption(8 * 3600.0, 6) == 2 * 3600.0
    clock = Clock()
    calm, stormy = CommitPolicy("auto", 1, 24 * 3600.0, clock), CommitPolicy("auto", 1, 600.0, clock)
    for policy in (calm, stormy):
        policy.commit_started()
        policy.commit_finished(stall_seconds=1.0, seconds=1.0)
    clock.now += 60
    assert (calm.due(1), stormy.due(1)) == (False, True)
