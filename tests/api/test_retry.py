"""The retry policy, with made-up failures and times."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune.job import BackoffSpec, RetrySpec
from spotune.retry import (
    COMMUNICATION_FAILURE_LIMIT,
    Failure,
    FailureCause,
    GiveUp,
    Retry,
    decide,
    failures_without_progress,
    when_gpu_hours_are_used,
)
from spotune.units.durations import Duration

POLICY = RetrySpec(
    app_failure_limit=3, backoff=BackoffSpec(initial=Duration("5s"), max=Duration("5m")), max_gpu_hours=100
)
FOR_EVER = [
    FailureCause.WORKER_LOST,
    FailureCause.HEAD_LOST,
    FailureCause.PREEMPTED,
    FailureCause.HANG,
    FailureCause.INFRASTRUCTURE,
]
USERS = [FailureCause.APP_ERROR, FailureCause.DATA]


def after(*steps: int, cause: FailureCause = FailureCause.WORKER_LOST, waited: float = 0.0) -> Retry | GiveUp:
    """The decision after failures at ``steps``, ``waited`` seconds after the last of them."""
    return decided([Failure(cause, step, time=1000.0 * n) for n, step in enumerate(steps)], waited=waited)


def decided(failures: Sequence[Failure], waited: float = 0.0, can_use_less_memory: bool = True) -> Retry | GiveUp:
    return decide(failures, POLICY, now=failures[-1].time + waited, can_use_less_memory=can_use_less_memory)


@pytest.mark.parametrize("cause", FOR_EVER)
def test_the_first_retry_is_immediate_and_the_next_ones_back_off_exponentially(cause: FailureCause) -> None:
    waits = [after(*[7] * count, cause=cause) for count in range(1, 10)]
    assert waits == [Retry(seconds) for seconds in (0, 5, 10, 20, 40, 80, 160, 300, 300)]


@pytest.mark.parametrize("cause", FOR_EVER)
def test_infrastructure_failures_are_always_retried(cause: FailureCause) -> None:
    assert after(*[0] * 5000, cause=cause) == Retry(300)


def test_a_new_step_makes_the_next_retry_immediate_again() -> None:
    assert after(7, 7, 7, 8) == Retry(0)
    assert after(7, 7, 7, 8, 8) == Retry(5)


def test_a_step_reached_before_is_not_progress() -> None:
    assert after(100, 60, 99) == Retry(10)


def test_time_since_the_failure_is_subtracted_from_the_backoff() -> None:
    assert after(7, 7, 7, waited=4) == Retry(6)
    assert after(7, 7, 7, waited=3600) == Retry(0)


@pytest.mark.parametrize("cause", USERS)
def test_a_permanent_failure_is_given_up_at_the_limit_with_its_message(cause: FailureCause) -> None:
    failures = [Failure(cause, 5, time=float(n), message="KeyError: 'sql'") for n in range(3)]
    assert isinstance(decided(failures[:2]), Retry)
    assert decided(failures) == GiveUp(
        "the model, data or code of the job failed 3 times without a new step (step 5): KeyError: 'sql'", exit_code=20
    )


@pytest.mark.parametrize("cause", USERS)
def test_an_occasional_failure_is_never_given_up(cause: FailureCause) -> None:
    assert after(*range(1, 1000), cause=cause) == Retry(0)


def test_only_progress_resets_the_count_of_the_users_failures() -> None:
    causes = [FailureCause.APP_ERROR, FailureCause.PREEMPTED, FailureCause.DATA, FailureCause.WORKER_LOST]
    failures = [Failure(cause, 5, time=float(n)) for n, cause in enumerate(causes)]
    assert decided(failures) == Retry(20)
    assert isinstance(decided([*failures, Failure(FailureCause.APP_ERROR, 5, time=9)]), GiveUp)
    assert decided([*failures, Failure(FailureCause.APP_ERROR, 6, time=9)]) == Retry(0)


def test_a_limit_of_one_gives_up_at_once() -> None:
    failures = [Failure(FailureCause.APP_ERROR, 0, time=0.0)]
    decision = decide(failures, RetrySpec(app_failure_limit=1), now=0.0, can_use_less_memory=False)
    assert decision == GiveUp("the model, data or code of the job failed once without a new step (step 0)", 20)


def test_communication_errors_back_off_and_are_given_up_as_infrastructure() -> None:
    cause = FailureCause.COMMUNICATION
    assert after(*[5] * (COMMUNICATION_FAILURE_LIMIT - 1), cause=cause) == Retry(300)
    decision = after(*[5] * COMMUNICATION_FAILURE_LIMIT, cause=cause)
    assert decision == GiveUp("the workers could not reach one another 10 times without a new step (step 5)", 10)


def test_out_of_memory_is_retried_immediately_with_less_memory() -> None:
    failure = Failure(FailureCause.OUT_OF_MEMORY, 5, time=0.0)
    assert decided([failure]) == Retry(0, use_less_memory=True)
    assert decided([failure] * 3) == Retry(0, use_less_memory=True)


def test_out_of_memory_with_one_sample_is_given_up_with_what_to_do() -> None:
    failure = Failure(FailureCause.OUT_OF_MEMORY, 5, time=0.0, message="CUDA out of memory")
    decision = decided([failure], can_use_less_memory=False)
    assert isinstance(decision, GiveUp)
    assert decision.exit_code == 20
    assert decision.reason.startswith(
        "out of memory at step 5 with the smallest batch that the job allows: use more workers"
    )
    assert decision.reason.endswith(": CUDA out of memory")


def test_spent_gpu_hours_end_the_job() -> None:
    assert when_gpu_hours_are_used(99.9, POLICY) is None
    assert when_gpu_hours_are_used(100, POLICY) == GiveUp(
        "100.0 GPU hours used, retry.maxGpuHours is 100: raise it to continue from the last checkpoint", 20
    )
    assert when_gpu_hours_are_used(1e9, RetrySpec()) is None


@given(st.lists(st.integers(0, 20), min_size=1))
def test_the_streak_starts_at_the_last_failure_that_came_after_a_new_step(steps: list[int]) -> None:
    failures = [Failure(FailureCause.WORKER_LOST, step, time=0.0) for step in steps]
    streak = failures_without_progress(failures)
    assert failures[-len(streak) :] == streak
    assert streak[0].step == max(steps) or max(steps) == 0
    assert all(failure.step < streak[0].step or streak[0].step == 0 for failure in failures[: -len(streak)])


@given(
    st.lists(st.tuples(st.sampled_from(FailureCause), st.integers(0, 9)), min_size=1, max_size=50),
    st.floats(0, 1e6),
)
def test_no_backoff_exceeds_the_maximum(history: list[tuple[FailureCause, int]], waited: float) -> None:
    failures = [Failure(cause, step, time=float(n)) for n, (cause, step) in enumerate(history)]
    decision = decided(failures, waited)
    assert isinstance(decision, GiveUp) or 0 <= decision.after_seconds <= 300


def test_causes_are_named_as_in_status_and_ledger() -> None:
    assert [cause.value for cause in FailureCause] == [
        "workerLost",
        "headLost",
        "preempted",
        "hang",
        "appError",
        "outOfMemory",
        "data",
        "communication",
        "infrastructure",
    ]
