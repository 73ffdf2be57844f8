"""A discrete-event simulation of one job on a trace: its driver, worker groups and checkpoints.

Between two events there are only equal steps, so steps are not simulated one by one. All durations (of a step, a start,
a restore, a commit) are inputs, given in ``Timings``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from spotune.goodput import Part
from spotune.plan.checkpoint_interval import (
    MINIMUM_INTERVAL_SECONDS,
    background_interval_seconds,
    mean_seconds_between_failures,
    seconds_to_preemption,
)
from spotune.retry import backoff_seconds
from spotune.simulate.supply import NodeSupply, supply
from spotune.simulate.terms import NEVER, Scenario, SimulationResult, Timings
from spotune.simulate.trace import Trace

_MAX_REPEATS = 1000


def simulate(
    trace: Trace, scenario: Scenario, times: Timings, steps: int | None = None, seed: int = 0
) -> SimulationResult:
    """Simulate a job on a trace.

    Args:
        trace: Spot nodes over time; it is repeated if training takes longer.
        scenario: The user's choices.
        times: Durations of all activities.
        steps: Number of steps of the job; None: as many as fit into the trace.
        seed: Random seed for which nodes are lost: the head's or a worker's.
    """
    moments = supply(trace, scenario.workers, scenario.capacity, scenario.head, scenario.on_demand_after, Random(seed))
    horizon = trace.seconds if steps is None else trace.seconds * _MAX_REPEATS
    run = _Simulation(moments, scenario, times, steps, horizon)
    run.run()
    return run.outcome


class _SimulationEnded(Exception):  # noqa: N818 - not an error
    """The simulation ends, because the trace or the work is finished."""


@dataclass(frozen=True)
class _SavedState:
    """A saved training state: its step, and the productive time up to it."""

    steps: int = 0
    productive: float = 0.0


class _Simulation:
    """The simulation of one job."""

    def __init__(
        self, moments: Iterator[NodeSupply], scenario: Scenario, times: Timings, steps: int | None, horizon: float
    ) -> None:
        self.outcome = SimulationResult()
        self._scenario = scenario
        self._times = times
        self._steps = steps
        self._horizon = horizon
        self._now = 0.0
        self._moments = moments
        self._upcoming: deque[NodeSupply] = deque()
        self._current = next(moments)
        self._committed: _SavedState | None = None
        self._streak = 0
        self._highest = 0
        self._losses = 0
        self._worker_seconds = 0.0

    def run(self) -> None:
        """Run until all steps are done or the horizon is reached."""
        try:
            self._spend(Part.STARTUP, self._times.attempt)
            while True:
                self._run_worker_group()
        except _SimulationEnded:
            return

    # Time and nodes

    def _spend(self, part: Part, seconds: float) -> None:
        """Advance time by so many seconds. Raises _SimulationEnded at the horizon."""
        self._spend_until(part, self._now + seconds)

    def _spend_until(self, part: Part, until: float) -> None:
        """Advance time to exactly ``until``; adding a duration to a float could miss it."""
        until = max(self._now, min(until, self._horizon))
        self.outcome.spent[part] += until - self._now
        self._advance_to(until)
        if until >= self._horizon:
            raise _SimulationEnded

    def _advance_to(self, until: float) -> None:
        """Move to a time: account for node seconds, and apply all supply changes up to it."""
        while (coming := self._peek(0)) is not None and coming.seconds <= until:
            self._accrue_node_seconds(coming.seconds)
            self._current = self._upcoming.popleft()
        self._accrue_node_seconds(until)

    def _accrue_node_seconds(self, until: float) -> None:
        seconds = until - self._now
        self.outcome.spot_seconds += self._current.spot * seconds
        self.outcome.on_demand_seconds += self._current.on_demand * seconds
        self.outcome.head_seconds += self._current.head * seconds
        self._now = until

    def _peek(self, index: int) -> NodeSupply | None:
        """The upcoming supply change with the given index; None if there is none."""
        while len(self._upcoming) <= index:
            moment = next(self._moments, None)
            if moment is None:
                return None
            self._upcoming.append(moment)
        return self._upcoming[index]

    def _future(self) -> Iterator[NodeSupply]:
        """The upcoming supply changes before the horizon."""
        index = 0
        while (moment := self._peek(index)) is not None and moment.seconds < self._horizon:
            yield moment
            index += 1

    # One worker group

    def _run_worker_group(self) -> None:
        """Run one worker group, from waiting for workers to its end."""
        workers = self._wait_for_workers()
        self.outcome.restarts += 1
        began = self._now
        loss = self._next_loss(workers)
        until = loss.seconds if loss is not None else NEVER
        resize_at = self._next_resize(workers, began, until)
        if self._start(until) and not self._train(workers, until, resize_at):
            self._worker_seconds += workers * (self._now - began)
            return  # the group was resized
        self._worker_seconds += workers * (self._now - began)
        assert loss is not None, "nothing else ends a worker group"
        self._fail(head_lost=loss.head_lost)

    def _wait_for_workers(self) -> int:
        """Wait for all workers, or after the driver's patience for at least the minimum, and return their number."""
        scenario, began = self._scenario, self._now
        while True:
            available = self._current.workers if self._current.head else 0
            timeout_at = began + self._times.patience
            if available >= scenario.workers or (available >= scenario.min_workers and self._now >= timeout_at):
                return min(available, scenario.workers)
            coming = self._peek(0)
            change = coming.seconds if coming is not None else NEVER
            if available >= scenario.min_workers:
                change = min(change, timeout_at)
            self._spend_until(Part.WAITING, change)

    def _next_loss(self, workers: int) -> NodeSupply | None:
        """The supply change that loses the head or a worker of the group; idle workers are lost first."""
        idle = self._current.workers - workers
        before = self._current.workers
        for moment in self._future():
            idle = max(0, idle)
            if moment.head_lost or moment.lost > idle:
                return moment
            idle += moment.workers - before
            before = moment.workers
        return None

    def _next_resize(self, workers: int, began: float, until: float) -> float:
        """The time at which the group stops to use more workers; NEVER if that is not before ``until``."""
        earliest = began + self._scenario.resize_cooldown
        if workers >= self._scenario.workers or earliest == NEVER:
            return NEVER
        steady = self._times.steady
        more_since = self._now if self._current.workers > workers else NEVER
        for moment in self._future():
            if moment.seconds >= until or moment.seconds >= max(more_since + steady, earliest):
                break
            more_since = min(more_since, moment.seconds) if moment.workers > workers else NEVER
        leaves = max(more_since + steady, earliest)
        return leaves if leaves < until else NEVER

    def _start(self, until: float) -> bool:
        """Start up and restore; False if a worker is lost in the meantime."""
        parts = [(Part.STARTUP, self._times.start_up)]
        if self._committed is not None:
            parts.append((Part.RESTORE, self._times.restore))
        for part, seconds in parts:
            self._spend_until(part, min(self._now + seconds, until))
            if self._now >= until:
                return False
        return True

    def _train(self, workers: int, until: float, resize_at: float) -> bool:
        """Train and commit until a worker is lost (returns True) or the group is resized (returns False)."""
        commits = _CommitSchedule(self._scenario, self._times, self._now, workers, self._seconds_to_preemption())
        step_seconds = self._times.step_seconds(workers)
        notice_at = until - self._scenario.notice if self._scenario.notice else NEVER
        resize_at = resize_at if resize_at < until - self._times.commit else NEVER
        while True:
            due = max(min(commits.due_at, notice_at, resize_at), commits.busy_until)
            if not self._step_until(due, commits.steps_until_due(self.outcome.steps), until, step_seconds):
                self._record_commit(commits.durable(self._now))
                return True
            self._record_commit(commits.durable(self._now))
            state = _SavedState(self.outcome.steps, self.outcome.spent[Part.PRODUCTIVE])
            if self.outcome.steps == self._steps:
                self._wait_for_commit(until)
                self.outcome.finished = self._now < until
                if self.outcome.finished:
                    raise _SimulationEnded
                return True
            if self._now < commits.busy_until:
                continue  # one commit at a time: wait for the next due step
            if self._now >= resize_at:
                self._wait_for_commit(until)
                self._record_commit(state if self._now < until else None)
                return self._now >= until
            begun = self._now
            notice_at = notice_at if begun < notice_at else NEVER
            self._spend_until(Part.CHECKPOINT_STALL, min(begun + self._times.stall, until))
            commits.begin(state, begun)

    def _wait_for_commit(self, until: float) -> None:
        durable = self._now + max(self._times.stall, self._times.commit)
        self._spend_until(Part.CHECKPOINT_STALL, min(durable, until))

    def _step_until(self, due: float, steps_due: float, until: float, step_seconds: float) -> bool:
        """Train until a commit is due at the end of a step; False if a worker is lost before."""
        whole = step_seconds + self._times.data_wait
        left = NEVER if self._steps is None else self._steps - self.outcome.steps
        target = min(max(1, math.ceil((due - self._now) / whole)) if due < NEVER else NEVER, steps_due, left)
        limit = min(until, self._horizon)
        completed = min(target, (limit - self._now) // whole)
        count = int(completed)
        self.outcome.steps += count
        self.outcome.spent[Part.PRODUCTIVE] += count * step_seconds
        self.outcome.spent[Part.DATA_WAIT] += count * self._times.data_wait
        self._advance_to(self._now + count * whole)
        if completed == target and self._now < limit:
            return True
        self._spend_until(Part.LOST if until <= self._horizon else Part.PRODUCTIVE, limit)
        return False

    def _record_commit(self, durable: _SavedState | None) -> None:
        self._committed = durable or self._committed

    def _seconds_to_preemption(self) -> float:
        return seconds_to_preemption(self._worker_seconds, self._losses)

    # Failures

    def _fail(self, *, head_lost: bool) -> None:
        """Roll back to the last commit, and wait for the retry policy's backoff or for a new head."""
        self._losses += 1
        self._streak = 1 if self.outcome.steps > self._highest else self._streak + 1
        self._highest = max(self._highest, self.outcome.steps)
        kept = self._committed or _SavedState()
        lost = self.outcome.spent[Part.PRODUCTIVE] - kept.productive
        self.outcome.spent[Part.PRODUCTIVE] -= lost
        self.outcome.spent[Part.LOST] += lost
        self.outcome.steps_lost += self.outcome.steps - kept.steps
        self.outcome.steps = kept.steps
        if head_lost:
            self._spend(Part.WAITING, self._times.head_loss)
            while not self._current.head:
                coming = self._peek(0)
                self._spend_until(Part.WAITING, coming.seconds if coming is not None else NEVER)
            self._spend(Part.STARTUP, self._times.attempt)
            return
        self._spend(Part.LOST, self._times.detection)
        pause = backoff_seconds(self._streak - 1, self._times.backoff, self._times.longest_backoff)
        self._spend(Part.WAITING, pause)


class _CommitSchedule:
    """When a worker group commits, with the trainer's rules, and which commit is durable."""

    def __init__(
        self, scenario: Scenario, times: Timings, now: float, workers: int, seconds_to_preemption: float
    ) -> None:
        self._every = scenario.checkpoint_every
        self._times = times
        self._between_failures = mean_seconds_between_failures(seconds_to_preemption, workers)
        self._interval = MINIMUM_INTERVAL_SECONDS if scenario.checkpoint_every == "auto" else NEVER
        if isinstance(scenario.checkpoint_every, float):
            self._interval = scenario.checkpoint_every
        self._pending: _SavedState | None = None
        self.due_at = now + self._interval
        self.busy_until = now

    def steps_until_due(self, steps: int) -> float:
        """Steps until the next commit if the interval is in steps; else NEVER."""
        return self._every - steps % self._every if isinstance(self._every, int) else NEVER

    def begin(self, state: _SavedState, now: float) -> None:
        """Start committing a state."""
        self._pending = state
        self.busy_until = now + max(self._times.stall, self._times.commit)
        if self._every == "auto":
            self._interval = background_interval_seconds(self._times.stall, self._times.commit, self._between_failures)
        self.due_at = now + self._interval

    def durable(self, now: float) -> _SavedState | None:
        """Return the state whose commit has become durable by now, once; else None."""
        if self._pending is None or now < self.busy_until:
            return None
        durable, self._pending = self._pending, None
        return durable
