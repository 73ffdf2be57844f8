"""What happens when things fail, and when they end."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from spotune.job.base import Positive, Section, invalid
from spotune.units.durations import Duration


def _more_than_zero(duration: Duration) -> Duration:
    if duration.seconds <= 0:
        invalid("", "must be longer than 0s")
    return duration


_LONGER_THAN_ZERO = {"rule": "self.matches('[1-9]')", "message": "must be longer than 0s"}

PositiveDuration = Annotated[
    Duration,
    AfterValidator(_more_than_zero),
    Field(json_schema_extra={"x-kubernetes-validations": [_LONGER_THAN_ZERO]}),
]


class BackoffSpec(Section):
    """Waiting times between attempts that make no new step; the first retry is at once."""

    initial: PositiveDuration = Duration("5s")
    """Wait before the second retry without a new step; it doubles with each further one."""
    max: PositiveDuration = Duration("5m")
    """Longest wait."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.initial.seconds > self.max.seconds:
            invalid("max", f"{self.max} is shorter than initial, {self.initial}")
        return self


class RetrySpec(Section):
    """What counts as failed for good; lost workers, preemptions and hangs never do."""

    app_failure_limit: Positive = 3
    """Failures of the user's model, data or code without one new step after which the job is Failed."""
    backoff: BackoffSpec = BackoffSpec()
    """Waiting times between attempts."""
    hang_timeout: PositiveDuration = Duration("30m")
    """A worker group without a sign of life for so long is ended and started again."""
    max_gpu_hours: Annotated[float, Field(ge=0)] = 0
    """GPU hours over all attempts after which no new attempt is started; 0: no limit."""


class CleanupSpec(Section):
    """What happens to the Ray cluster of a job that has ended."""

    cluster: Literal["delete", "keep"] = "delete"
    """delete: give the nodes back; keep: leave the cluster for looking at."""
    after: Duration = Duration("5m")
    """Time after the end of the job."""
