"""What a worker group does on a notice: examples computed by hand, and properties over random cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune.resize.leaving import Leave, Notice, decide_leaving
from spotune.resize.times import MeasuredTimes, Phase, lost_seconds, seconds_before_deadline

TIMES = MeasuredTimes(step={4: 1.0}, commit=4.0, stall=0.5, change={"process": 15.0, "restore": 5.0})
RESERVE = 1.5 * 4.0 + 3.0 + 2 * 1.0
NOTICE = Notice(
    workers=4, slots=3, minimum=1, deadline_seconds=120.0, steps=100_000, arrivals=(60.0,), regrow_seconds=600.0
)
SMALLER = 1 / 4
"""What a second with three workers loses, compared with four."""


def test_phases_lose_what_their_workers_do_not_train() -> None:
    phases = [Phase(10.0, 0), Phase(40.0, 2), Phase(8.0, 4)]
    assert lost_seconds(phases, 4, 1000, TIMES, 4) == pytest.approx(10 + 40 / 2)
    assert lost_seconds(phases, 2, 1000, TIMES, 4) == pytest.approx(10 + 20 + (1000 - 20 - 8))
    assert lost_seconds(phases, 2, 20, TIMES, 4) == pytest.approx(10 + 20), "the steps are done"
    assert lost_seconds(phases, 4, math.inf, TIMES, 4) == pytest.approx(30)
    assert lost_seconds(phases, 3, math.inf, TIMES, 4) == math.inf


def test_replacement_that_comes_before_the_deadline_is_waited_for_in_training() -> None:
    decision = decide_leaving(NOTICE, TIMES)
    assert decision.choice is Leave.WAIT
    assert decision.leave_after_seconds == 120 - RESERVE
    full = 0.5 + 4 + 20
    assert decision.lost_seconds[Leave.WAIT] == full
    late = 60 + 10 - (4 + 20)
    assert decision.lost_seconds[Leave.LEAVE_NOW] == pytest.approx(4 + 20 + max(600, late) * SMALLER + 4 + 20)


def test_replacement_soon_after_the_deadline_is_waited_for_without_a_smaller_group() -> None:
    decision = decide_leaving(replace(NOTICE, arrivals=(160.0, 200.0)), TIMES)
    left = 120 - RESERVE + 4
    assert decision.choice is Leave.WAIT
    assert decision.patience_seconds == pytest.approx(1.1 * 200 - left + 1)
    idle = ((160 - left) + (200 - left)) / 2
    assert decision.lost_seconds[Leave.WAIT] == pytest.approx(0.5 + 4 + idle + 20, abs=1e-3)
    assert decision.lost_seconds[Leave.TRAIN_ON] == pytest.approx(0.5 + 4 + 20 + 600 * SMALLER + 4 + 20, abs=1e-3)


def test_a_smaller_group_follows_if_replacements_take_long() -> None:
    decision = decide_leaving(replace(NOTICE, arrivals=(3600.0,)), TIMES)
    assert decision.choice is Leave.TRAIN_ON
    assert decision.patience_seconds == 0
    assert decision.lost_seconds[Leave.TRAIN_ON] < decision.lost_seconds[Leave.DEFAULT]
    assert "3 of 4 continue" in decision.reason


def test_no_wait_is_worth_it_if_only_a_few_steps_remain() -> None:
    decision = decide_leaving(replace(NOTICE, steps=130, arrivals=(600.0,)), TIMES)
    assert decision.choice is Leave.TRAIN_ON
    remaining = 130 - (120 - RESERVE - 0.5)
    slower = remaining / 3 * 4 - remaining
    assert decision.lost_seconds[Leave.TRAIN_ON] == pytest.approx(0.5 + 4 + 20 + slower, abs=1e-3)


def test_a_run_that_ends_before_the_deadline_trains_on() -> None:
    decision = decide_leaving(replace(NOTICE, steps=50), TIMES)
    assert decision.choice in (Leave.WAIT, Leave.TRAIN_ON)
    assert decision.lost_seconds[decision.choice] == 0.5


def test_group_leaves_at_once_if_a_slot_is_free() -> None:
    """Then it loses a change and no more, and not even the stall of the commit at the notice."""
    decision = decide_leaving(replace(NOTICE, slots=4, arrivals=()), TIMES)
    assert (decision.choice, decision.leave_after_seconds) == (Leave.LEAVE_NOW, 0.0)
    assert decision.lost_seconds == {Leave.LEAVE_NOW: 24.0, Leave.TRAIN_ON: 24.5, Leave.DEFAULT: 24.5}
    assert "as many continue" in decision.reason


def test_group_leaves_at_once_if_nodes_are_lost_before_their_deadlines() -> None:
    """All steps after the commit at the notice would be made again, and another worker is no help."""
    notice = replace(NOTICE, deadline_seconds=600.0, arrivals=(30.0,), regrow_seconds=0.0, lost_early=0.9)
    decision = decide_leaving(notice, TIMES)
    assert decision.leave_after_seconds == 0.0
    kept = decide_leaving(replace(notice, lost_early=0.0), TIMES)
    assert kept.leave_after_seconds == 600 - RESERVE


@pytest.mark.parametrize("deadline", [RESERVE - 0.1, 5.0])
def test_short_notice_leaves_time_for_one_commit_only(deadline: float) -> None:
    decision = decide_leaving(replace(NOTICE, deadline_seconds=deadline), TIMES)
    assert decision.leave_after_seconds == 0.0


def test_notice_that_is_too_short_for_a_commit_leaves_the_wait_to_decide() -> None:
    decision = decide_leaving(replace(NOTICE, deadline_seconds=4.0, arrivals=(3600.0,)), TIMES)
    assert (decision.choice, decision.leave_after_seconds) == (Leave.TRAIN_ON, None)
    assert Leave.LEAVE_NOW not in decision.lost_seconds


def test_no_deadline_means_to_leave_at_once() -> None:
    decision = decide_leaving(replace(NOTICE, deadline_seconds=None), TIMES)
    assert (decision.choice, decision.leave_after_seconds) == (Leave.WAIT, 0.0)
    assert decision.patience_seconds == pytest.approx(1.1 * 60 - 4 + 1)


def test_too_few_slots_for_a_smaller_group_mean_that_it_is_waited_for() -> None:
    decision = decide_leaving(replace(NOTICE, minimum=4, arrivals=(3600.0,)), TIMES)
    assert decision.leave_after_seconds == 120 - RESERVE
    assert "training waits for a replacement" in decision.reason


@pytest.mark.parametrize(
    ("arrivals", "times", "reason"),
    [
        ((60.0,), "there was no commit yet", "because there was no commit yet"),
        ((), TIMES, "because no replacement of a worker has come in this run yet"),
    ],
)
def test_without_measurements_the_group_behaves_as_before_and_reports_why(
    arrivals: tuple[float, ...], times: MeasuredTimes | str, reason: str
) -> None:
    decision = decide_leaving(replace(NOTICE, arrivals=arrivals), times)
    assert (decision.choice, decision.patience_seconds, decision.lost_seconds) == (Leave.DEFAULT, 30.0, {})
    assert decision.leave_after_seconds is None, "the group itself knows when it has to leave"
    assert decision.reason.endswith(reason)
    assert decide_leaving(replace(NOTICE, deadline_seconds=None), "x").leave_after_seconds == 0.0


def test_reason_names_the_losses_of_all_ways() -> None:
    reason = decide_leaving(replace(NOTICE, arrivals=(3600.0,)), TIMES).reason
    assert reason.startswith("the workers train on until just before the deadline, and 3 of 4 continue: loses ")
    for way in ("leaving at once", "waiting for a replacement", "training on and waiting for 30 s"):
        assert way in reason


seconds = st.floats(0.01, 2000)
measured = st.builds(
    MeasuredTimes,
    step=st.dictionaries(st.integers(1, 8), st.floats(0.01, 60), min_size=1),
    commit=st.floats(0.01, 300),
    stall=st.floats(0, 10),
    change=st.fixed_dictionaries({"process": seconds, "restore": seconds}),
)
notices = st.builds(
    Notice,
    workers=st.integers(1, 8),
    slots=st.integers(0, 8),
    minimum=st.integers(1, 8),
    deadline_seconds=st.none() | st.floats(0, 900),
    steps=st.integers(0, 100_000) | st.just(math.inf),
    arrivals=st.lists(st.floats(0, 5000), min_size=1, max_size=5).map(tuple),
    regrow_seconds=st.floats(0, 3600) | st.just(math.inf),
    lost_early=st.floats(0, 1),
)


@given(notices, measured)
def test_no_decision_loses_more_than_the_default(notice: Notice, times: MeasuredTimes) -> None:
    decision = decide_leaving(notice, times)
    assert decision.choice in decision.lost_seconds
    assert all(decision.lost_seconds[decision.choice] <= lost for lost in decision.lost_seconds.values())
    assert decision.lost_seconds[decision.choice] <= decision.lost_seconds[Leave.DEFAULT]


@given(notices, measured)
def test_a_commit_that_is_decided_on_fits_before_the_deadline(notice: Notice, times: MeasuredTimes) -> None:
    decision = decide_leaving(notice, times)
    step = times.step_seconds(notice.workers)
    if notice.deadline_seconds is None:
        assert decision.leave_after_seconds == 0
    elif decision.leave_after_seconds is None:
        assert notice.deadline_seconds < times.commit + step
    else:
        assert decision.leave_after_seconds + step + times.commit <= notice.deadline_seconds
        latest = notice.deadline_seconds - seconds_before_deadline(times.commit, step)
        assert decision.leave_after_seconds <= max(0.0, latest)


@given(notices, measured)
def test_patience_is_never_shorter_than_the_arrivals_that_it_is_for(notice: Notice, times: MeasuredTimes) -> None:
    decision = decide_leaving(notice, times)
    assert decision.patience_seconds >= 0
    assert decision.patience_seconds <= max(notice.patience_seconds, 1.1 * max(notice.arrivals) + 1)


@given(notices, measured)
def test_ample_slots_never_make_a_group_wait(notice: Notice, times: MeasuredTimes) -> None:
    decision = decide_leaving(replace(notice, slots=notice.workers, minimum=1), times)
    assert Leave.WAIT not in decision.lost_seconds
