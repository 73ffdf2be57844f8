"""When to commit: after a number of steps, after a time, or by what commits cost and how often workers are lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from spotune.durations import Duration
from spotune.plan.interval import (
    MINIMUM_INTERVAL_SECONDS,
    SECONDS_TO_PREEMPTION,
    checkpoint_interval_seconds,
    mean_seconds_between_failures,
)


class CommitPolicy:
    """Decides on rank 0 after which steps a checkpoint is committed; the last step always is.

    Args:
        every: `checkpoint.every` of the job: auto, a duration, or a number of steps.
        world_size: workers of the group; the more there are, the sooner one is lost.
        clock: seconds, monotonic.
    """

    def __init__(self, every: str | int, world_size: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._seconds_between_failures = mean_seconds_between_failures(SECONDS_TO_PREEMPTION, world_size)
        self._clock = clock
        self._last = clock()
        self._interval_seconds = every.seconds if isinstance(every, Duration) else MINIMUM_INTERVAL_SECONDS

    def due(self, step: int) -> bool:
        """Whether to commit once `step` optimizer steps are done."""
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._clock() - self._last >= self._interval_seconds

    def committed(self, stall_seconds: float) -> None:
        """A commit stalled training for so long; with `auto` the next interval follows from that by Daly's formula."""
        self._last = self._clock()
        if self._every == "auto":
            self._interval_seconds = checkpoint_interval_seconds(stall_seconds, self._seconds_between_failures)
