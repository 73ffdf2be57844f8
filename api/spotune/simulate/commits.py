"""When a simulated worker group commits, with the trainer's rules, and which commit is durable."""

from __future__ import annotations

from dataclasses import dataclass

from spotune.plan.checkpoint_interval import (
    MINIMUM_INTERVAL_SECONDS,
    background_interval_seconds,
    mean_seconds_between_failures,
)
from spotune.simulate.terms import NEVER, Scenario, Timings


@dataclass(frozen=True)
class SavedState:
    """A saved training state: its step, and the productive time up to it."""

    steps: int = 0
    productive: float = 0.0


class CommitSchedule:
    """The commits of one worker group."""

    def __init__(
        self, scenario: Scenario, times: Timings, now: float, workers: int, seconds_to_preemption: float
    ) -> None:
        self._every = scenario.checkpoint_every
        self._times = times
        self._between_failures = mean_seconds_between_failures(seconds_to_preemption, workers)
        self._interval = MINIMUM_INTERVAL_SECONDS if scenario.checkpoint_every == "auto" else NEVER
        if isinstance(scenario.checkpoint_every, float):
            self._interval = scenario.checkpoint_every
        self._pending: SavedState | None = None
        self.due_at = now + self._interval
        self.busy_until = now

    def steps_until_due(self, steps: int) -> float:
        """Steps until the next commit if the interval is in steps; else NEVER."""
        return self._every - steps % self._every if isinstance(self._every, int) else NEVER

    def begin(self, state: SavedState, now: float) -> None:
        """Start committing a state."""
        self._pending = state
        self.busy_until = now + max(self._times.stall, self._times.commit)
        if self._every == "auto":
            self._interval = background_interval_seconds(self._times.stall, self._times.commit, self._between_failures)
        self.due_at = now + self._interval

    def durable(self, now: float) -> SavedState | None:
        """Return the state whose commit has become durable by now, once; else None."""
        if self._pending is None or now < self.busy_until:
            return None
        durable, self._pending = self._pending, None
        return durable
