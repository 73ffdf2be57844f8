"""When to commit: every so many steps, every so many seconds, or (`auto`) by Daly's optimal interval."""

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
    """Decides on rank 0 after which steps to commit. The last step is committed in any case, by the training loop.

    Args:
        every: `checkpoint.every` of the job: `auto`, a duration, or a number of steps.
        world_size: number of workers; the more there are, the sooner one of them is lost.
        seconds_to_preemption: mean time until a given worker is preempted.
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
        self._last_start = clock()
        self._interval_seconds = every.seconds if isinstance(every, Duration) else MINIMUM_INTERVAL_SECONDS

    def due(self, step: int) -> bool:
        """Whether to commit once `step` optimizer steps are done."""
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._clock() - self._last_start >= self._interval_seconds

    def commit_started(self) -> None:
        """Record that a commit has started. The interval counts from here: a failure goes back to this state."""
        self._last_start = self._clock()

    def commit_finished(self, stall_seconds: float, seconds: float) -> None:
        """Record what a commit cost; with `auto`, this sets the next interval.

        Args:
            stall_seconds: how long training waited for it; Daly's formula takes this as the cost of a checkpoint.
            seconds: from its start until it was durable; the interval is never shorter than this.
        """
        if self._every == "auto":
            self._interval_seconds = background_interval_seconds(stall_seconds, seconds, self._seconds_between_failures)
