"""Whether a worker group leaves for a larger one: examples computed by hand, and properties over random cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune.resize.growing import Grow, MoreSlots, decide_growing
from spotune.resize.times import MeasuredTimes

TIMES = MeasuredTimes(step={4: 1.0}, commit=4.0, stall=0.5, change={"process": 15.0, "restore": 5.0})
CHANGE = 24.0
MORE = MoreSlots(workers=2, slots=3, desired=4, steps=10_000, regrow_seconds=600.0)


def test_group_grows_if_the_remaining_steps_gain_more_than_a_change() -> None:
    decision = decide_growing(MORE, TIMES)
    assert decision.choice is Grow.GROW
    slower = 10_000 * (2.0 - 4 / 3)
    assert decision.lost_seconds == {Grow.GROW: CHANGE, Grow.KEEP: pytest.approx(slower, abs=1e-3)}


def test_group_keeps_its_size_if_little_work_remains() -> None:
    """A step takes 2 s with two workers, and 4/3 s with three. So 36 steps are what a change costs."""
    assert decide_growing(replace(MORE, steps=37), TIMES).choice is Grow.GROW
    decision = decide_growing(replace(MORE, steps=35), TIMES)
    assert decision.choice is Grow.KEEP
    assert decision.reason.startswith("keeping the group loses 23.3 s of training; growing now 24.0 s")


def test_one_change_for_two_workers_is_cheaper_than_two_changes() -> None:
    """Until the fourth worker is there, two workers instead of three lose a quarter of each second."""
    decision = decide_growing(replace(MORE, arrivals=(20.0,)), TIMES)
    assert decision.choice is Grow.WAIT_FOR_MORE
    assert decision.lost_seconds[Grow.WAIT_FOR_MORE] == pytest.approx((20 + 10) / 2 + CHANGE)
    three = (600.0) / 4
    assert decision.lost_seconds[Grow.GROW] == pytest.approx(CHANGE + three + CHANGE)


def test_a_worker_that_takes_long_to_come_is_not_waited_for() -> None:
    assert decide_growing(replace(MORE, arrivals=(3600.0,)), TIMES).choice is Grow.GROW


def test_a_second_change_is_not_expected_if_it_would_not_pay() -> None:
    """Of 100 steps with three workers, the last ones with a fourth would not gain what another change costs."""
    decision = decide_growing(replace(MORE, steps=100, arrivals=(60.0,), regrow_seconds=0.0), TIMES)
    assert decision.lost_seconds[Grow.GROW] == pytest.approx(CHANGE + 100 * (4 / 3 - 1), abs=1e-3)


def test_no_more_workers_than_desired_are_waited_for() -> None:
    decision = decide_growing(replace(MORE, slots=4, arrivals=(1.0,)), TIMES)
    assert decision.choice is Grow.GROW
    assert Grow.WAIT_FOR_MORE not in decision.lost_seconds


def test_group_waits_for_a_commit_as_long_as_one_more_would_cost() -> None:
    """Three workers need two thirds of the time of two, so 1.5 s with two lose the 0.5 s of a commit's stall."""
    assert decide_growing(MORE, TIMES).commit_within_seconds == pytest.approx(1.5)


def test_without_measurements_the_group_grows_at_once_and_reports_why() -> None:
    decision = decide_growing(replace(MORE, arrivals=(20.0,)), "there was no commit yet")
    assert (decision.choice, decision.commit_within_seconds, decision.lost_seconds) == (Grow.GROW, 0.0, {})
    assert decision.reason == "the gain is not weighed, because there was no commit yet"


@given(
    st.builds(
        MoreSlots,
        workers=st.integers(1, 3),
        slots=st.integers(4, 6),
        desired=st.integers(6, 8),
        steps=st.integers(0, 100_000) | st.just(math.inf),
        arrivals=st.lists(st.floats(0, 5000), max_size=4).map(tuple),
        regrow_seconds=st.floats(0, 3600) | st.just(math.inf),
    ),
    st.builds(
        MeasuredTimes,
        step=st.dictionaries(st.integers(1, 8), st.floats(0.01, 60), min_size=1),
        commit=st.floats(0.01, 300),
        stall=st.floats(0, 10),
        change=st.fixed_dictionaries({"process": st.floats(0.01, 600)}),
    ),
)
def test_no_decision_loses_more_than_to_grow_at_once(more: MoreSlots, times: MeasuredTimes) -> None:
    decision = decide_growing(more, times)
    assert not any(math.isnan(lost) for lost in decision.lost_seconds.values())
    assert decision.lost_seconds[decision.choice] <= decision.lost_seconds[Grow.GROW]
    assert decision.commit_within_seconds >= 0
