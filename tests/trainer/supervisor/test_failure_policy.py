"""The supervisor's decisions, on an artificial clock."""

from __future__ import annotations

import pytest

from spotune.job import RetrySpec
from spotune.job.lifecycle import BackoffSpec
from spotune.retry import Failure, FailureCause
from spotune.units.durations import Duration
from spotune_trainer.supervisor.failure_policy import (
    DriverExit,
    ExitSupervisor,
    HeartbeatWatch,
    Resubmit,
    classify_driver_exit,
    failure_cause,
    next_action,
)
from spotune_trainer.supervisor.ray_head.jobs_client import RayJob

POLICY = RetrySpec(
    app_failure_limit=3, backoff=BackoffSpec(initial=Duration("5s"), max=Duration("60s")), max_gpu_hours=0.1
)


def ray_job(status: str, exit_code: int | None = None) -> RayJob:
    return RayJob("spotune-1", status, exit_code, "", {})


@pytest.mark.parametrize(
    ("job", "driver_exit"),
    [
        (ray_job("PENDING"), None),
        (ray_job("RUNNING"), None),
        (ray_job("SUCCEEDED", 0), DriverExit.DONE),
        (ray_job("FAILED", 10), DriverExit.INFRASTRUCTURE),
        (ray_job("FAILED", 20), DriverExit.FAILED),
        (ray_job("FAILED", 30), DriverExit.SUPERSEDED),
        (ray_job("FAILED", 1), DriverExit.CRASHED),
        (ray_job("FAILED", -9), DriverExit.VANISHED),
        (ray_job("FAILED", 137), DriverExit.VANISHED),
        (ray_job("FAILED"), DriverExit.VANISHED),
        (ray_job("STOPPED"), DriverExit.VANISHED),
        (None, DriverExit.VANISHED),
    ],
)
def test_exit_code_determines_how_a_driver_exited(job: RayJob | None, driver_exit: DriverExit | None) -> None:
    assert classify_driver_exit(job) == driver_exit


def test_driver_stopped_for_its_stale_heartbeat_hung() -> None:
    assert classify_driver_exit(ray_job("RUNNING"), hung=True) is None
    assert classify_driver_exit(ray_job("STOPPED"), hung=True) is DriverExit.HUNG
    assert classify_driver_exit(None, hung=True) is DriverExit.HUNG


def test_driver_that_finished_despite_a_stale_heartbeat_is_done() -> None:
    assert classify_driver_exit(ray_job("SUCCEEDED", 0), hung=True) is DriverExit.DONE


@pytest.mark.parametrize(
    ("driver_exit", "exit_code"), [(DriverExit.DONE, 0), (DriverExit.FAILED, 20), (DriverExit.SUPERSEDED, 30)]
)
def test_final_exits_end_the_supervisor(driver_exit: DriverExit, exit_code: int) -> None:
    assert next_action(driver_exit, [], POLICY, now=0.0, stopping=False) == ExitSupervisor(exit_code)
    assert next_action(driver_exit, [], POLICY, now=0.0, stopping=True) == ExitSupervisor(exit_code)


def test_requested_stop_exits_with_10() -> None:
    assert next_action(DriverExit.INFRASTRUCTURE, [], POLICY, now=0.0, stopping=True) == ExitSupervisor(10)


def run_down(driver_exit: DriverExit, times: int, steps: list[int] | None = None) -> list[Resubmit | ExitSupervisor]:
    """The actions after each of `times` such exits at the same time."""
    failures: list[Failure] = []
    actions = []
    for index in range(times):
        failures.append(Failure(failure_cause(driver_exit), steps[index] if steps else 7, 100.0))
        actions.append(next_action(driver_exit, failures, POLICY, now=100.0, stopping=False))
    return actions


@pytest.mark.parametrize("driver_exit", [DriverExit.VANISHED, DriverExit.HUNG, DriverExit.INFRASTRUCTURE])
def test_lost_driver_is_resubmitted_without_limit_with_growing_waits(driver_exit: DriverExit) -> None:
    waits = [action.after_seconds for action in run_down(driver_exit, 100) if isinstance(action, Resubmit)]
    assert waits[:7] == [0.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert len(waits) == 100


def test_new_step_resets_the_waits() -> None:
    actions = run_down(DriverExit.VANISHED, 4, steps=[7, 7, 7, 8])
    assert actions[-1] == Resubmit(0.0)


def test_supervisor_gives_up_on_a_driver_that_crashes_again_and_again() -> None:
    assert run_down(DriverExit.CRASHED, 3)[-1] == ExitSupervisor(10)
    assert isinstance(run_down(DriverExit.CRASHED, 3, steps=[1, 2, 3])[-1], Resubmit)


def test_causes_are_those_of_the_ledger() -> None:
    assert failure_cause(DriverExit.VANISHED) is FailureCause.HEAD_LOST
    assert failure_cause(DriverExit.HUNG) is FailureCause.HANG


class TestHeartbeat:
    def test_is_stale_after_the_timeout_without_a_change(self) -> None:
        watch = HeartbeatWatch(10.0, now=0.0)
        watch.observe(1, 5.0)
        watch.observe(1, 15.0)
        assert not watch.is_stale(15.0)
        assert watch.is_stale(15.1)

    def test_every_change_counts_even_a_decrease(self) -> None:
        watch = HeartbeatWatch(10.0, now=0.0)
        watch.observe(500, 5.0)
        watch.observe(1, 14.0)
        assert not watch.is_stale(24.0)

    def test_new_attempt_has_the_whole_timeout_for_its_first_heartbeat(self) -> None:
        watch = HeartbeatWatch(10.0, now=0.0)
        watch.observe(3, 1.0)
        watch.restart(100.0)
        watch.observe(3, 109.0)
        assert not watch.is_stale(109.0)
        assert watch.is_stale(111.0)
