"""The retry policy: after a failure, decide whether to retry, when and how. A pure function.

Progress means a step that was never reached before. Lost workers, preemptions, hangs and storage failures are always
retried: the first time immediately, then with exponential backoff until there is progress. Failures of the user's
model, data or code are retried ``appFailureLimit - 1`` times without progress. So a program that always fails ends, and
one that fails occasionally is never given up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from spotune.errors import InfrastructureError, JobError
from spotune.job import RetrySpec

COMMUNICATION_FAILURE_LIMIT = 10
"""Number of communication failures between live workers without a new step after which retries stop."""

_MAX_DOUBLINGS = 64  # avoids float overflow


class FailureCause(StrEnum):
    """Why a worker group or driver failed. The values are the names in status and ledger."""

    WORKER_LOST = "workerLost"
    HEAD_LOST = "headLost"
    PREEMPTED = "preempted"
    HANG = "hang"
    APP_ERROR = "appError"
    OUT_OF_MEMORY = "outOfMemory"
    DATA = "data"
    COMMUNICATION = "communication"
    INFRASTRUCTURE = "infrastructure"


_APPLICATION_CAUSES = frozenset({FailureCause.APP_ERROR, FailureCause.DATA})


@dataclass(frozen=True)
class Failure:
    """One failure of a worker group or driver.

    Attributes:
        cause: Why it failed.
        step: The highest step reached before the failure, counted from the start of the job, saved or not.
        time: Time of the failure, in seconds of a clock that does not go backwards between failures.
        message: The error message.
    """

    cause: FailureCause
    step: int
    time: float
    message: str = ""


@dataclass(frozen=True)
class Retry:
    """Decision to run again.

    Attributes:
        after_seconds: Time to wait from now, in seconds.
        use_less_memory: Choose a layout that takes less memory, with the same global batch size.
    """

    after_seconds: float
    use_less_memory: bool = False


@dataclass(frozen=True)
class GiveUp:
    """Decision not to run again.

    Attributes:
        reason: Message for the user: what happened, how often, and what to do.
        exit_code: 20 if the user has to change something, 10 if running the same command again may help.
    """

    reason: str
    exit_code: int


def decide(
    failures: Sequence[Failure],
    policy: RetrySpec,
    *,
    now: float,
    can_use_less_memory: bool,
) -> Retry | GiveUp:
    """Decide what to do after the last of ``failures``.

    Args:
        failures: All failures of the job so far, oldest first; at least one.
        policy: The job's ``retry`` section.
        now: Current time on the clock of ``Failure.time``. Time since the failure is subtracted from the backoff.
        can_use_less_memory: Whether a layout with less memory exists for the last attempt, for example because its
            micro-batch has more than one sample and is not fixed by `execution.reproducible`.
    """
    last = failures[-1]
    streak = failures_without_progress(failures)
    if last.cause is FailureCause.OUT_OF_MEMORY:
        return _after_out_of_memory(last, can_use_less_memory=can_use_less_memory)
    backoff = backoff_seconds(len(streak) - 1, policy.backoff.initial.seconds, policy.backoff.max.seconds)
    waited = max(0.0, now - last.time)
    return _give_up_over_limit(streak, policy) or Retry(max(0.0, backoff - waited))


def when_gpu_hours_are_used(gpu_hours: float, policy: RetrySpec) -> GiveUp | None:
    """Give up if all attempts together used as many GPU hours as ``maxGpuHours`` allows; else None."""
    if not 0 < policy.max_gpu_hours <= gpu_hours:
        return None
    used = f"{gpu_hours:.1f} GPU hours used, retry.maxGpuHours is {policy.max_gpu_hours:g}"
    return GiveUp(f"{used}: raise it to continue from the last checkpoint", JobError.exit_code)


def backoff_seconds(retries_before: int, initial: float, maximum: float) -> float:
    """Pause in seconds before a retry, after `retries_before` retries without a new step.

    It is 0 for the first retry, then `initial`, and doubles up to `maximum`.
    """
    if retries_before == 0:
        return 0.0
    return min(initial * 2.0 ** min(retries_before - 1, _MAX_DOUBLINGS), maximum)


def failures_without_progress(failures: Sequence[Failure]) -> list[Failure]:
    """The failures since the last progress, starting with the first failure after it."""
    highest, start = 0, 0
    for index, failure in enumerate(failures):
        if failure.step > highest:
            highest, start = failure.step, index
    return list(failures[start:])


def _after_out_of_memory(last: Failure, *, can_use_less_memory: bool) -> Retry | GiveUp:
    if can_use_less_memory:
        return Retry(0.0, use_less_memory=True)
    what = f"out of memory at step {last.step} with the smallest batch that the job allows"
    remedy = (
        "use more workers, a higher execution.zeroStage, gradientCheckpointing: true, a smaller dataset.maxLength, "
        "with execution.reproducible a smaller microBatchSize, or a smaller batch in training.config"
    )
    return GiveUp(f"{what}: {remedy}{_with_message(last)}", JobError.exit_code)


def _give_up_over_limit(streak: Sequence[Failure], policy: RetrySpec) -> GiveUp | None:
    """Give up if a limited cause has occurred too often without a new step; else None."""
    last = streak[-1]
    if last.cause in _APPLICATION_CAUSES:
        count, limit = sum(failure.cause in _APPLICATION_CAUSES for failure in streak), policy.app_failure_limit
        what, exit_code = "the model, data or code of the job failed", JobError.exit_code
    elif last.cause is FailureCause.COMMUNICATION:
        count, limit = sum(failure.cause is last.cause for failure in streak), COMMUNICATION_FAILURE_LIMIT
        what, exit_code = "the workers could not reach one another", InfrastructureError.exit_code
    else:
        return None
    if count < limit:
        return None
    times = "once" if count == 1 else f"{count} times"
    return GiveUp(f"{what} {times} without a new step (step {last.step}){_with_message(last)}", exit_code)


def _with_message(failure: Failure) -> str:
    return f": {failure.message}" if failure.message else ""
