"""The supervisor's decisions, on a clock of the tests' own."""

from __future__ import annotations

import pytest

from spotune.job import RetrySpec
from spotune.job.lifecycle import BackoffSpec
from spotune.retry import Failure, FailureCause
from spotune.units.durations import Duration
from spotune_trainer.supervisor.failure_policy import (
    Ending,
    HeartbeatWatch,
    Leave,
    SubmitAgain,
    cause_of,
    ending_of,
    next_move,
)
from spotune_trainer.supervisor.ray_head.jobs_client import RayJob

POLICY = RetrySpec(
    app_failure_limit=3, backoff=BackoffSpec(initial=Duration("5s"), max=Duration("60s")), max_gpu_hours=0.1
)


def ray_job(status: str, exit_code: int | None = None) -> RayJob:
    return RayJob("spotune-1", status, exit_code, "", {})


@pytest.mark.parametrize(
    ("job", "ending"),
    [
        (ray_job("PENDING"), None),
        (ray_job("RUNNING"), None),
        (ray_job("SUCCEEDED", 0), Ending.DONE),
        (ray_job("FAILED", 10), Ending.INFRASTRUCTURE),
        (ray_job("FAILED", 20), Ending.FAILED),
        (ray_job("FAILED", 30), Ending.SUPERSEDED),
        (ray_job("FAILED", 1), Ending.CRASHED),
        (ray_job("FAILED", -9), Ending.VANISHED),
        (ray_job("FAILED", 137), Ending.VANISHED),
        (ray_job("FAILED"), Ending.VANISHED),
        (ray_job("STOPPED"), Ending.VANISHED),
        (None, Ending.VANISHED),
    ],
)
def test_exit_code_says_how_an_attempt_ended(job: RayJob | None, ending: Ending | None) -> None:
    assert ending_of(job) == ending


def test_driver_that_was_ended_for_its_heartbeat_hung() -> None:
    assert ending_of(ray_job("RUNNING"), hung=True) is None
    assert ending_of(ray_job("STOPPED"), hung=True) is Ending.HUNG
    assert ending_of(None, hung=True) is Ending.HUNG


def test_driver_that_finished_after_all_is_done() -> None:
    assert ending_of(ray_job("SUCCEEDED", 0), hung=True) is Ending.DONE


@pytest.mark.parametrize(("ending", "exit_code"), [(Ending.DONE, 0), (Ending.FAILED, 20), (Ending.SUPERSEDED, 30)])
def test_final_endings_end_the_supervisor(ending: Ending, exit_code: int) -> None:
    assert next_move(ending, [], POLICY, now=0.0, stopping=False) == Leave(exit_code)
    assert next_move(ending, [], POLICY, now=0.0, stopping=True) == Leave(exit_code)


def test_stop_that_was_asked_for_leaves_with_ten() -> None:
    assert next_move(Ending.INFRASTRUCTURE, [], POLICY, now=0.0, stopping=True) == Leave(10)


def run_down(ending: Ending, times: int, steps: list[int] | None = None) -> list[SubmitAgain | Leave]:
    """The moves after each of `times` such endings, at one moment."""
    failures: list[Failure] = []
    moves = []
    for index in range(times):
        failures.append(Failure(cause_of(ending), steps[index] if steps else 7, 100.0))
        moves.append(next_move(ending, failures, POLICY, now=100.0, stopping=False))
    return moves


@pytest.mark.parametrize("ending", [Ending.VANISHED, Ending.HUNG, Ending.INFRASTRUCTURE])
def test_lost_driver_is_started_for_ever_with_longer_and_longer_waits(ending: Ending) -> None:
    waits = [move.after_seconds for move in run_down(ending, 100) if isinstance(move, SubmitAgain)]
    assert waits[:7] == [0.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert len(waits) == 100


def test_new_step_resets_the_waits() -> None:
    moves = run_down(Ending.VANISHED, 4, steps=[7, 7, 7, 8])
    assert moves[-1] == SubmitAgain(0.0)


def test_driver_that_crashes_again_and_again_is_given_up() -> None:
    assert run_down(Ending.CRASHED, 3)[-1] == Leave(10)
    assert isinstance(run_down(Ending.CRASHED, 3, steps=[1, 2, 3])[-1], SubmitAgain)


def test_causes_are_those_of_the_ledger() -> None:
    assert cause_of(Ending.VANISHED) is FailureCause.HEAD_LOST
    assert cause_of(Ending.HUNG) is FailureCause.HANG


class TestHeartbeat:
    def test_is_stale_when_it_stays_the_same_for_too_long(self) -> None:
        watch = HeartbeatWatch(10.0, now=0.0)
        watch.observe(1, 5.0)
        watch.observe(1, 15.0)
        assert not watch.is_stale(15.0)
        assert watch.is_stale(15.1)

    def test_every_change_counts_even_to_a_smaller_number(self) -> None:
        watch = HeartbeatWatch(10.0, now=0.0)
        watch.observe(500, 5.0)
        watch.observe(1, 14.0)
        assert not watch.is_stale(24.0)

    def test_new_attempt_has_the_whole_time_for_its_first_beat(self) -> None:
        watch = HeartbeatWatch(10.0, now=0.0)
        watch.observe(3, 1.0)
        watch.restart(100.0)
        watch.observe(3, 109.0)
        assert not watch.is_stale(109.0)
        assert watch.is_stale(111.0)
