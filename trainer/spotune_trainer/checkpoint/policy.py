"""When to commit: after a number of steps, after a time, or by what commits cost and how often workers are lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from spotune.plan.checkpoint_interval import (
    MINIMUM_INTERVAL_SECONDS,
    SECONDS_TO_PREEMPTION,
    background_interval_seconds,
    mean_seconds_between_failures,
)
from spotune.units.durations import Duration


class CommitPolicy:
    """Decides on rank 0 after which steps a checkpoint is committed; the last step always is.

    Args:
        every: `checkpoint.every` of the job: auto, a duration, or a number of steps.
        world_size: workers of the group; the more there are, the sooner one is lost.
        seconds_to_preemption: mean time until one worker is taken away.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        every: str | int,
        world_size: int = 1,
        seconds_to_preemption: float = SECONDS_TO_PREEMPTION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._seconds_between_failures = mean_seconds_between_failures(seconds_to_preemption, world_size)
        self._clock = clock
        self._last = clock()
        self._interval_seconds = every.seconds if isinstance(every, Duration) else MINIMUM_INTERVAL_SECONDS

    def due(self, step: int) -> bool:
        """Whether to commit once `step` optimizer steps are done."""
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._clock() - self._last >= self._interval_seconds

    def begun(self) -> None:
        """A commit has begun; a time counts from here, since this is the state that a failure goes back to."""
        self._last = self._clock()

    def committed(self, stall_seconds: float, seconds: float) -> None:
        """A commit kept training waiting for so long, and was durable after so long.

        With `auto` the next interval follows from the first by Daly's formula, and is not shorter than the second.
        """
        if self._every == "auto":
            self._interval_seconds = background_interval_seconds(stall_seconds, seconds, self._seconds_between_failures)
