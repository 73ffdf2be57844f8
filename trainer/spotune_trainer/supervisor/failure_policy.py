"""The supervisor's decisions as pure functions: how a driver exited, what follows, and whether a driver hangs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from spotune.errors import InfrastructureError, JobError, SupersededError
from spotune.job import RetrySpec
from spotune.retry import Failure, FailureCause, GiveUp, decide, failures_without_progress
from spotune_trainer.supervisor.ray_head.jobs_client import RayJob


class DriverExit(StrEnum):
    """How the driver of an attempt exited.

    CRASHED is an exit code that the driver never returns on purpose, so a bug of the driver or of its Python.
    VANISHED is a driver that a signal killed, or that was lost with its Ray head.
    """

    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    INFRASTRUCTURE = "infrastructure"
    CRASHED = "crashed"
    VANISHED = "vanished"
    HUNG = "hung"


_EXIT_OF_CODE = {
    0: DriverExit.DONE,
    InfrastructureError.exit_code: DriverExit.INFRASTRUCTURE,
    JobError.exit_code: DriverExit.FAILED,
    SupersededError.exit_code: DriverExit.SUPERSEDED,
}
_FINAL_EXIT_CODE = {
    DriverExit.DONE: 0,
    DriverExit.FAILED: JobError.exit_code,
    DriverExit.SUPERSEDED: SupersededError.exit_code,
}
_FIRST_EXIT_CODE_OF_A_SIGNAL = 128
_CAUSE = {
    DriverExit.INFRASTRUCTURE: FailureCause.INFRASTRUCTURE,
    DriverExit.CRASHED: FailureCause.INFRASTRUCTURE,
    DriverExit.VANISHED: FailureCause.HEAD_LOST,
    DriverExit.HUNG: FailureCause.HANG,
}


def classify_driver_exit(job: RayJob | None, *, hung: bool = False) -> DriverExit | None:
    """How the driver of an attempt exited; None while it runs.

    Args:
        job: the attempt in Ray; None where the head is gone or has no record of the attempt.
        hung: whether the supervisor stopped the driver because its heartbeat was stale.
    """
    if job is None:
        return DriverExit.HUNG if hung else DriverExit.VANISHED
    if not job.has_ended:
        return None
    if job.exit_code in _EXIT_OF_CODE:
        return _EXIT_OF_CODE[job.exit_code]
    if hung:
        return DriverExit.HUNG
    exited_by_itself = job.exit_code is not None and 0 < job.exit_code < _FIRST_EXIT_CODE_OF_A_SIGNAL
    return DriverExit.CRASHED if exited_by_itself else DriverExit.VANISHED


def failure_cause(driver_exit: DriverExit) -> FailureCause:
    """The cause under which an exit is counted that is followed by another attempt."""
    return _CAUSE[driver_exit]


@dataclass(frozen=True)
class Resubmit:
    """Submit the next attempt after `after_seconds`."""

    after_seconds: float


@dataclass(frozen=True)
class ExitSupervisor:
    """End the supervisor with this exit code."""

    exit_code: int


def next_action(
    driver_exit: DriverExit, failures: Sequence[Failure], policy: RetrySpec, *, now: float, stopping: bool
) -> Resubmit | ExitSupervisor:
    """What follows the exit of a driver.

    The driver applies the limits of the job's `retry` section and the supervisor its backoff. The one exception is a
    driver that crashes again and again without a new step: it cannot apply a limit itself, so the supervisor gives up.

    Args:
        driver_exit: how the driver exited.
        failures: of this supervisor's attempts, oldest first, including this exit if it is a failure.
        policy: the job's `retry` section.
        now: Unix time in seconds, as in the failures.
        stopping: whether a stop was requested.
    """
    if driver_exit in _FINAL_EXIT_CODE:
        return ExitSupervisor(_FINAL_EXIT_CODE[driver_exit])
    crashes = len(failures_without_progress(failures)) if driver_exit is DriverExit.CRASHED else 0
    if stopping or crashes >= policy.app_failure_limit:
        return ExitSupervisor(InfrastructureError.exit_code)
    decision = decide(failures, policy, now=now, can_use_less_memory=False)
    assert not isinstance(decision, GiveUp), "lost drivers are resubmitted without a limit"
    return Resubmit(decision.after_seconds)


class HeartbeatWatch:
    """Detects a hung driver: the heartbeat in `status.json` no longer changes.

    Args:
        timeout_seconds: time without a change after which the heartbeat is stale.
        now: seconds on a monotonic clock, as for all methods.
    """

    def __init__(self, timeout_seconds: float, now: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._heartbeat: int | None = None
        self._changed_at = now

    def restart(self, now: float) -> None:
        """Give a new attempt the whole timeout for its first heartbeat."""
        self._changed_at = now

    def observe(self, heartbeat: int | None, now: float) -> None:
        """Record the present heartbeat; None if there is none yet."""
        if heartbeat != self._heartbeat:
            self._heartbeat = heartbeat
            self._changed_at = now

    def age_seconds(self, now: float) -> float:
        """Seconds since the heartbeat last changed."""
        return now - self._changed_at

    def is_stale(self, now: float) -> bool:
        """Whether the heartbeat has not changed for longer than the timeout."""
        return self.age_seconds(now) > self.timeout_seconds
