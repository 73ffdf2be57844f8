"""A discrete-event simulation of one job on a trace: its driver, worker groups and checkpoints.

Between two events there are only equal steps, so steps are not simulated one by one. All durations (of a step, a start,
a restore, a commit) are inputs, given in ``Timings``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum
from random import Random

from spotune.goodput import Part
from spotune.plan.checkpoint_interval import seconds_to_preemption
from spotune.resize.leaving import Leave
from spotune.resize.times import seconds_before_deadline
from spotune.retry import backoff_seconds
from spotune.simulate.commits import CommitSchedule, SavedState
from spotune.simulate.lookahead import Lookahead
from spotune.simulate.readiness import with_readiness
from spotune.simulate.resizing import ResizeDecisions
from spotune.simulate.supply import NodeSupply, supply
from spotune.simulate.terms import NEVER, Scenario, SimulationResult, Timings
from spotune.simulate.trace import Trace

_MAX_REPEATS = 1000
_RECHECK_SECONDS = 10.0
"""How often a larger group is decided on anew after it was postponed."""


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
    nodes = supply(trace, scenario.workers, scenario.capacity, scenario.head, scenario.on_demand_after, Random(seed))
    moments = with_readiness(nodes, scenario.notice, times.join)
    horizon = trace.seconds if steps is None else trace.seconds * _MAX_REPEATS
    run = _Simulation(moments, scenario, times, steps, horizon)
    run.run()
    return run.outcome


class _SimulationEnded(Exception):  # noqa: N818 - not an error
    """The simulation ends, because the trace or the work is finished."""


class _Exit(Enum):
    """Why a worker group exits."""

    LOST = "the head or a worker was lost"
    LEFT = "a node was going to be lost"
    RESIZED = "there are more workers"


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
        self._current = next(moments)
        self._moments = Lookahead(moments)
        self._committed: SavedState | None = None
        self._streak = 0
        self._highest = 0
        self._losses = 0
        self._worker_seconds = 0.0
        self._patience = times.patience
        self._enough = scenario.workers
        self._is_first = True
        self._resizing = ResizeDecisions(scenario, times)
        self._resizing.count_slots(self._current)

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
        while (coming := self._moments.peek(0)) is not None and coming.seconds <= until:
            self._accrue_node_seconds(coming.seconds)
            self._current = self._moments.take()
            self._resizing.count_slots(self._current)
        self._accrue_node_seconds(until)

    def _accrue_node_seconds(self, until: float) -> None:
        seconds = until - self._now
        self.outcome.spot_seconds += self._current.spot * seconds
        self.outcome.on_demand_seconds += self._current.on_demand * seconds
        self.outcome.head_seconds += self._current.head * seconds
        self._now = until

    def _future(self) -> Iterator[NodeSupply]:
        """The upcoming supply changes before the horizon."""
        index = 0
        while (moment := self._moments.peek(index)) is not None and moment.seconds < self._horizon:
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
        result = self._train(workers, loss, began) if self._start(until) else _Exit.LOST
        self._worker_seconds += workers * (self._now - began)
        if result is _Exit.RESIZED:
            self._patience = 0.0
            return
        assert loss is not None, "nothing else ends a worker group"
        if result is _Exit.LEFT:
            self._count_failure()
            self._back_off()
        else:
            self._fail(head_lost=loss.head_lost)

    def _wait_for_workers(self) -> int:
        """Wait for all workers, or after the driver's patience for at least the minimum, and return their number."""
        scenario, began = self._scenario, self._now
        patience, self._patience = self._patience, self._times.patience
        enough, self._enough = self._enough, scenario.workers
        while True:
            available = self._current.slots if self._current.head else 0
            # A node that has joined will be ready soon.
            timeout_at = began + (max(patience, self._times.patience) if self._current.joining else patience)
            if available >= enough or (available >= scenario.min_workers and self._now >= timeout_at):
                return min(available, scenario.workers)
            coming = self._moments.peek(0)
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

    def _next_notice(self, workers: int, until: float) -> float:
        """When a loss of further workers of the group is announced; NEVER if that is not before ``until``."""
        going = max(self._current.going, self._current.workers - workers)
        announced = (moment.seconds for moment in self._future() if moment.seconds >= until or moment.going > going)
        at = next(announced, NEVER)
        return at if at < until else NEVER

    def _next_resize(self, workers: int, began: float, until: float) -> float:
        """The time at which the group stops to use more workers; NEVER if that is not before ``until``."""
        earliest = began + self._scenario.resize_cooldown
        if workers >= self._scenario.workers or earliest == NEVER:
            return NEVER
        steady = self._times.steady
        more_since = self._now if self._current.slots > workers else NEVER
        for moment in self._future():
            if moment.seconds >= until or moment.seconds >= max(more_since + steady, earliest):
                break
            more_since = min(more_since, moment.seconds) if moment.slots > workers else NEVER
        leaves = max(more_since + steady, earliest)
        return leaves if leaves < until - self._times.commit else NEVER

    def _start(self, until: float) -> bool:
        """Start up and restore; False if a worker is lost in the meantime."""
        first = self._times.first_start_up if self._is_first else None
        parts = [(Part.STARTUP, self._times.start_up if first is None else first)]
        self._is_first = False
        if self._committed is not None:
            parts.append((Part.RESTORE, self._times.restore))
        for part, seconds in parts:
            self._spend_until(part, min(self._now + seconds, until))
            if self._now >= until:
                return False
        return True

    def _train(self, workers: int, loss: NodeSupply | None, began: float) -> _Exit:
        """Train and commit until a worker is lost, or until the group leaves."""
        commits = CommitSchedule(self._scenario, self._times, self._now, workers, self._seconds_to_preemption())
        step_seconds = self._times.step_seconds(workers)
        until = loss.seconds if loss is not None else NEVER
        notice_at = until - self._scenario.notice if self._scenario.notice else NEVER
        leave_at, resize_at = NEVER, self._next_resize(workers, began, until)
        while True:
            due = min(max(min(commits.due_at, notice_at, resize_at), commits.busy_until), leave_at)
            if not self._step_until(due, commits.steps_until_due(self.outcome.steps), until, step_seconds):
                self._record_commit(commits.durable(self._now))
                return _Exit.LOST
            self._record_commit(commits.durable(self._now))
            state = SavedState(self.outcome.steps, self.outcome.spent[Part.PRODUCTIVE])
            if self.outcome.steps == self._steps:
                self._finish(until)
                return _Exit.LOST
            if self._now >= leave_at:
                return self._commit_and_exit(commits, state, until, _Exit.LEFT)
            if self._now < commits.busy_until:
                continue  # one commit at a time: wait for the next due step
            if self._now >= resize_at:
                if self._grows(workers):
                    return self._commit_and_exit(commits, state, until, _Exit.RESIZED)
                resize_at = self._recheck_at(workers, began, until)
                continue
            begun = self._now
            if begun >= notice_at:
                assert loss is not None, "a notice is for a loss"
                notice_at, leave_at = self._next_notice(workers, until), self._leave_at(workers, loss)
                if leave_at <= begun:
                    continue  # the commit after the next step is the last one
            self._spend_until(Part.CHECKPOINT_STALL, min(begun + self._times.stall, until))
            commits.begin(state, begun)

    def _finish(self, until: float) -> None:
        """Make the last commit. Raises _SimulationEnded, unless a worker is lost before."""
        self._wait_for_commit(until)
        self.outcome.finished = self._now < until
        if self.outcome.finished:
            raise _SimulationEnded

    def _commit_and_exit(self, commits: CommitSchedule, state: SavedState, until: float, result: _Exit) -> _Exit:
        """Commit and wait until it is durable; returns `result`, or that a worker was lost before."""
        self._spend_until(Part.CHECKPOINT_STALL, min(commits.busy_until, until))
        self._record_commit(commits.durable(self._now))
        self._wait_for_commit(until)
        if self._now >= until:
            return _Exit.LOST
        self._record_commit(state)
        return result

    def _leave_at(self, workers: int, loss: NodeSupply) -> float:
        """When a group with a notice is to leave; NEVER if it is for the head, or too short for a commit.

        Sets how many workers the next group waits for, and how long.
        """
        if loss.head_lost:
            return NEVER
        slots, deadline = min(workers, self._current.slots), loss.seconds - self._now
        decision = self._resizing.on_notice(workers, slots, deadline, self._steps_left(), self._now)
        if decision.choice is not Leave.DEFAULT:
            self._patience, self._enough = decision.patience_seconds, workers
            after = decision.leave_after_seconds
            return NEVER if after is None else self._now + after
        step_seconds = self._times.step_seconds(workers) + self._times.data_wait
        latest = loss.seconds - seconds_before_deadline(self._times.commit, step_seconds)
        return max(self._now, latest) if deadline >= self._times.commit else NEVER

    def _grows(self, workers: int) -> bool:
        """Whether a group leaves for a larger one now."""
        slots = min(self._current.slots, self._scenario.workers)
        return self._resizing.grows(workers, slots, self._steps_left(), self._now)

    def _recheck_at(self, workers: int, began: float, until: float) -> float:
        """When a resize that was postponed is decided on anew; NEVER if there is no time for it before ``until``."""
        recheck_at = max(self._now + _RECHECK_SECONDS, self._next_resize(workers, began, until))
        return recheck_at if recheck_at < until - self._times.commit else NEVER

    def _steps_left(self) -> float:
        return NEVER if self._steps is None else self._steps - self.outcome.steps

    def _wait_for_commit(self, until: float) -> None:
        durable = self._now + max(self._times.stall, self._times.commit)
        self._spend_until(Part.CHECKPOINT_STALL, min(durable, until))

    def _step_until(self, due: float, steps_due: float, until: float, step_seconds: float) -> bool:
        """Train until a commit is due at the end of a step; False if a worker is lost before."""
        whole = step_seconds + self._times.data_wait
        target = min(max(1, math.ceil((due - self._now) / whole)) if due < NEVER else NEVER, steps_due)
        target = min(target, self._steps_left())
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

    def _record_commit(self, durable: SavedState | None) -> None:
        if durable is not None:
            self._committed = durable
            self._resizing.record_commit()

    def _seconds_to_preemption(self) -> float:
        return seconds_to_preemption(self._worker_seconds, self._losses)

    # Failures

    def _fail(self, *, head_lost: bool) -> None:
        """Roll back to the last commit, and wait for the retry policy's backoff or for a new head."""
        self._count_failure()
        kept = self._committed or SavedState()
        lost = self.outcome.spent[Part.PRODUCTIVE] - kept.productive
        self.outcome.spent[Part.PRODUCTIVE] -= lost
        self.outcome.spent[Part.LOST] += lost
        self.outcome.steps_lost += self.outcome.steps - kept.steps
        self.outcome.steps = kept.steps
        if head_lost:
            self._spend(Part.WAITING, self._times.head_loss)
            while not self._current.head:
                coming = self._moments.peek(0)
                self._spend_until(Part.WAITING, coming.seconds if coming is not None else NEVER)
            self._is_first = True
            self._spend(Part.STARTUP, self._times.attempt)
            return
        self._spend(Part.LOST, self._times.detection)
        self._back_off()

    def _count_failure(self) -> None:
        self._losses += 1
        self._streak = 1 if self.outcome.steps > self._highest else self._streak + 1
        self._highest = max(self._highest, self.outcome.steps)

    def _back_off(self) -> None:
        pause = backoff_seconds(self._streak - 1, self._times.backoff, self._times.longest_backoff)
        self._spend(Part.WAITING, pause)
