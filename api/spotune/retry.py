"""The retry policy: after a failure, run again (when, and how) or give up. Pure: failures, limits and time go in.

What counts is progress, a step that was never reached before. Lost workers, preemptions, hangs and failed storage are
retried for ever: the first time at once, then with exponential backoff while no new step is made. What the user's
model, data or code did is retried ``appFailureLimit - 1`` times without a new step: a program that always fails is not
run for ever, and one that fails now and then is never given up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from spotune.errors import InfrastructureError, JobError
from spotune.job import RetrySpec

COMMUNICATION_FAILURE_LIMIT = 10
"""Failures of communication between live workers without a new step after which it is not a passing fault."""

_MOST_DOUBLINGS = 64  # more of them would leave what a float can hold


class FailureCause(StrEnum):
    """Why a worker group or driver ended; the values are the names in status and ledger."""

    WORKER_LOST = "workerLost"
    HEAD_LOST = "headLost"
    PREEMPTED = "preempted"
    HANG = "hang"
    APP_ERROR = "appError"
    OUT_OF_MEMORY = "outOfMemory"
    DATA = "data"
    COMMUNICATION = "communication"
    INFRASTRUCTURE = "infrastructure"


_USERS_CAUSES = frozenset({FailureCause.APP_ERROR, FailureCause.DATA})


@dataclass(frozen=True)
class Failure:
    """One end of a worker group or driver that was not success.

    Attributes:
        cause: Why it ended.
        step: The highest step that was reached before it ended, counted from the start of the job, committed or not.
        time: When it ended, in seconds of any clock that does not go backwards between failures.
        message: The error's text, for people.
    """

    cause: FailureCause
    step: int
    time: float
    message: str = ""


@dataclass(frozen=True)
class Retry:
    """Run again.

    Attributes:
        after_seconds: Time to wait from now.
        use_less_memory: Lay the work out so that it takes less memory, same global batch size.
    """

    after_seconds: float
    use_less_memory: bool = False


@dataclass(frozen=True)
class GiveUp:
    """Do not run again.

    Attributes:
        reason: For people: what happened, how often, and what to do.
        exit_code: 20 where the user has to change something, 10 where running the same command again may help.
    """

    reason: str
    exit_code: int


def decide(
    failures: Sequence[Failure],
    policy: RetrySpec,
    *,
    now: float,
    can_use_less_memory: bool,
    gpu_hours: float = 0.0,
) -> Retry | GiveUp:
    """What to do after the last of ``failures``.

    Args:
        failures: All failures of the job so far, oldest first; at least one.
        policy: The job's ``retry`` section.
        now: Current time on the clock of ``Failure.time``; time that has passed since the failure counts as waited.
        can_use_less_memory: Whether the attempt that failed last could have been laid out so, as with a micro-batch of
            more than one sample.
        gpu_hours: GPU hours used by all attempts so far.
    """
    last = failures[-1]
    streak = failures_without_progress(failures)
    if 0 < policy.max_gpu_hours <= gpu_hours:
        used = f"{gpu_hours:.1f} GPU hours used, retry.maxGpuHours is {policy.max_gpu_hours:g}"
        return GiveUp(f"{used}: raise it to go on from the last checkpoint", JobError.exit_code)
    if last.cause is FailureCause.OUT_OF_MEMORY:
        return _after_out_of_memory(last, can_use_less_memory=can_use_less_memory)
    backoff = backoff_seconds(len(streak) - 1, policy.backoff.initial.seconds, policy.backoff.max.seconds)
    waited = max(0.0, now - last.time)
    return _over_limit(streak, policy) or Retry(max(0.0, backoff - waited))


def backoff_seconds(retries_before: int, initial: float, longest: float) -> float:
    """The pause before a retry that comes after so many without a new step: 0, `initial`, twice that, ... `longest`."""
    if retries_before == 0:
        return 0.0
    return min(initial * 2.0 ** min(retries_before - 1, _MOST_DOUBLINGS), longest)


def failures_without_progress(failures: Sequence[Failure]) -> list[Failure]:
    """The last failures since, and including, the one that last came after a new step."""
    highest, start = 0, 0
    for index, failure in enumerate(failures):
        if failure.step > highest:
            highest, start = failure.step, index
    return list(failures[start:])


def _after_out_of_memory(last: Failure, *, can_use_less_memory: bool) -> Retry | GiveUp:
    if can_use_less_memory:
        return Retry(0.0, use_less_memory=True)
    what = f"out of memory at step {last.step} with a micro-batch of one sample"
    remedy = (
        "use more workers, a higher execution.zeroStage, gradientCheckpointing: true, or a smaller dataset.maxLength"
    )
    return GiveUp(f"{what}: {remedy}{_quoted(last)}", JobError.exit_code)


def _over_limit(streak: Sequence[Failure], policy: RetrySpec) -> GiveUp | None:
    """Gives up on a cause that is bounded and has happened too often without a new step."""
    last = streak[-1]
    if last.cause in _USERS_CAUSES:
        count, limit = sum(failure.cause in _USERS_CAUSES for failure in streak), policy.app_failure_limit
        what, exit_code = "the model, data or code of the job failed", JobError.exit_code
    elif last.cause is FailureCause.COMMUNICATION:
        count, limit = sum(failure.cause is last.cause for failure in streak), COMMUNICATION_FAILURE_LIMIT
        what, exit_code = "the workers could not reach one another", InfrastructureError.exit_code
    else:
        return None
    if count < limit:
        return None
    times = "once" if count == 1 else f"{count} times"
    return GiveUp(f"{what} {times} without a new step (step {last.step}){_quoted(last)}", exit_code)


def _quoted(failure: Failure) -> str:
    return f": {failure.message}" if failure.message else ""
