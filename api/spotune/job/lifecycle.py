"""What happens when attempts fail, and after the job has ended."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from spotune.custom_resource.base import PositiveDuration, PositiveInt, Section, invalid
from spotune.units.durations import Duration

TtlSeconds = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Seconds after the end at which an object is deleted."""
TTL_WITH_SERVING: Final = "would delete the ModelService of spec.serving: remove one of the two"
TTL_LOSES_TRIALS: Final = "could delete a trial before the sweep has its result: use spec.ttlSecondsAfterFinished"


def check_ttl(ttl: int | None, serving: object | None) -> None:
    """Refuse a time after which the job is deleted, if it takes a ModelService along.

    Raises:
        PydanticCustomError: With the field and the remedy.
    """
    if ttl is not None and serving is not None:
        invalid("ttlSecondsAfterFinished", TTL_WITH_SERVING)


class BackoffSpec(Section):
    """Wait times between attempts that make no new step. The first retry is immediate."""

    initial: PositiveDuration = Duration("5s")
    """Wait before the second retry without a new step. It doubles with each further retry."""
    max: PositiveDuration = Duration("5m")
    """Maximum wait."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.initial.seconds > self.max.seconds:
            invalid("max", f"{self.max} is shorter than initial, {self.initial}")
        return self


class RetrySpec(Section):
    """When a job has failed for good. Lost workers, preemptions and hangs are always retried."""

    app_failure_limit: PositiveInt = 3
    """Number of failures of the model, data or code without a new step after which the job is Failed."""
    backoff: BackoffSpec = BackoffSpec()
    """Wait times between attempts."""
    hang_timeout: PositiveDuration = Duration("30m")
    """A worker group that sends no heartbeat for this long is stopped and restarted."""
    max_gpu_hours: Annotated[float, Field(ge=0)] = 0
    """GPU hours over all attempts after which no new attempt starts. 0: no limit."""


class CleanupSpec(Section):
    """What happens to the Ray cluster after the job has ended."""

    cluster: Literal["delete", "keep"] = "delete"
    """delete: release the nodes. keep: keep the cluster for inspection."""
    after: Duration = Duration("5m")
    """Delay after the end of the job."""
