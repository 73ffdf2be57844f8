"""What the supervisor decides, as pure functions: how an attempt ended, what follows, and whether it hangs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from spotune.errors import InfrastructureError, JobError, SupersededError
from spotune.job import RetrySpec
from spotune.retry import Failure, FailureCause, GiveUp, decide, failures_without_progress
from spotune_trainer.supervisor.ray_head.jobs_client import RayJob


class Ending(StrEnum):
    """How an attempt ended.

    CRASHED is an exit code that the driver never gives on purpose, so a fault of the driver itself or of its Python;
    VANISHED is a driver that a signal ended, or that went down with its Ray.
    """

    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    INFRASTRUCTURE = "infrastructure"
    CRASHED = "crashed"
    VANISHED = "vanished"
    HUNG = "hung"


_ENDING_OF_EXIT_CODE = {
    0: Ending.DONE,
    InfrastructureError.exit_code: Ending.INFRASTRUCTURE,
    JobError.exit_code: Ending.FAILED,
    SupersededError.exit_code: Ending.SUPERSEDED,
}
_FINAL_EXIT_CODE = {
    Ending.DONE: 0,
    Ending.FAILED: JobError.exit_code,
    Ending.SUPERSEDED: SupersededError.exit_code,
}
_FIRST_EXIT_CODE_OF_A_SIGNAL = 128
_CAUSE = {
    Ending.INFRASTRUCTURE: FailureCause.INFRASTRUCTURE,
    Ending.CRASHED: FailureCause.INFRASTRUCTURE,
    Ending.VANISHED: FailureCause.HEAD_LOST,
    Ending.HUNG: FailureCause.HANG,
}


def ending_of(job: RayJob | None, *, hung: bool = False) -> Ending | None:
    """How an attempt ended; None while it runs.

    Args:
        job: what Ray knows of it; None when this Ray has never seen it, or is gone.
        hung: whether we ended it because of its heartbeat.
    """
    if job is None:
        return Ending.HUNG if hung else Ending.VANISHED
    if not job.has_ended:
        return None
    if job.exit_code in _ENDING_OF_EXIT_CODE:
        return _ENDING_OF_EXIT_CODE[job.exit_code]
    if hung:
        return Ending.HUNG
    by_itself = job.exit_code is not None and 0 < job.exit_code < _FIRST_EXIT_CODE_OF_A_SIGNAL
    return Ending.CRASHED if by_itself else Ending.VANISHED


def cause_of(ending: Ending) -> FailureCause:
    """The cause that an ending which is not final counts as."""
    return _CAUSE[ending]


@dataclass(frozen=True)
class SubmitAgain:
    """Start the next attempt after `after_seconds`."""

    after_seconds: float


@dataclass(frozen=True)
class Leave:
    """End the supervisor with this exit code."""

    exit_code: int


def next_move(
    ending: Ending, failures: Sequence[Failure], policy: RetrySpec, *, now: float, stopping: bool
) -> SubmitAgain | Leave:
    """What follows the end of an attempt.

    Args:
        ending: how it ended.
        failures: of the attempts of this supervisor, oldest first; the last one is this ending where it is a failure.
        policy: the job's `retry` section. The driver applies its limits, we its backoff; only a driver that crashes
            again and again without a new step is not started for ever, since nothing would ever tell its user.
        now: on the clock of the failures.
        stopping: whether the supervisor was told to stop.
    """
    if ending in _FINAL_EXIT_CODE:
        return Leave(_FINAL_EXIT_CODE[ending])
    crashes = len(failures_without_progress(failures)) if ending is Ending.CRASHED else 0
    if stopping or crashes >= policy.app_failure_limit:
        return Leave(InfrastructureError.exit_code)
    decision = decide(failures, policy.model_copy(update={"max_gpu_hours": 0}), now=now, can_use_less_memory=False)
    assert not isinstance(decision, GiveUp), "lost drivers are started again for ever"
    return SubmitAgain(decision.after_seconds)


class HeartbeatWatch:
    """Tells a driver that works from one that hangs: the heartbeat in `status.json` must change.

    Args:
        timeout_seconds: so long it may stay the same.
        now: on any clock that does not go backwards.
    """

    def __init__(self, timeout_seconds: float, now: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._heartbeat: int | None = None
        self._changed = now

    def restart(self, now: float) -> None:
        """A new attempt begins: it has the whole time for its first beat."""
        self._changed = now

    def observe(self, heartbeat: int | None, now: float) -> None:
        """Take note of the heartbeat; None where there is none yet."""
        if heartbeat != self._heartbeat:
            self._heartbeat = heartbeat
            self._changed = now

    def age_seconds(self, now: float) -> float:
        """Seconds since the last change."""
        return now - self._changed

    def is_stale(self, now: float) -> bool:
        """Whether it has been the same for too long."""
        return self.age_seconds(now) > self.timeout_seconds
