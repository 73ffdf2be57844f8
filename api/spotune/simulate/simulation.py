"""One job over the nodes of a trace: a discrete-event simulation of what driver, workers and commits do.

Between two events nothing but equal steps happens, so steps are not simulated one by one. What a run is told in
``Times`` it does not find out: how long a step takes at each number of workers, a start, a restore, a commit.
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
from spotune.simulate.supply import Moment, supply
from spotune.simulate.terms import NEVER, Choice, Outcome, Times
from spotune.simulate.trace import Trace

_MOST_REPEATS = 1000


def simulate(trace: Trace, choice: Choice, times: Times, steps: int | None = None, seed: int = 0) -> Outcome:
    """Train on the nodes of a trace.

    Args:
        trace: Spot nodes over time; repeated where training takes longer.
        choice: What the user has chosen.
        times: What things take.
        steps: Steps of the job; None: as many as it gets done within the trace.
        seed: Of the choice which nodes are lost, the head's or workers'.
    """
    moments = supply(trace, choice.workers, choice.capacity, choice.head, choice.on_demand_after, Random(seed))
    horizon = trace.seconds if steps is None else trace.seconds * _MOST_REPEATS
    run = _Run(moments, choice, times, steps, horizon)
    run.run()
    return run.outcome


class _Over(Exception):  # noqa: N818 - nothing is wrong: time is up, or the work is done
    """The simulation ends."""


@dataclass(frozen=True)
class _Saved:
    """A state that was saved, and how much productive time there was by then."""

    steps: int = 0
    productive: float = 0.0


class _Run:
    """The simulation of one job."""

    def __init__(
        self, moments: Iterator[Moment], choice: Choice, times: Times, steps: int | None, horizon: float
    ) -> None:
        self.outcome = Outcome()
        self._choice = choice
        self._times = times
        self._steps = steps
        self._horizon = horizon
        self._now = 0.0
        self._moments = moments
        self._coming: deque[Moment] = deque()
        self._held = next(moments)
        self._committed: _Saved | None = None
        self._streak = 0
        self._highest = 0
        self._losses = 0
        self._worker_seconds = 0.0

    def run(self) -> None:
        """Until all steps are done, or the time is over."""
        try:
            self._spend(Part.STARTUP, self._times.attempt)
            while True:
                self._generation()
        except _Over:
            return

    # Time and nodes

    def _spend(self, part: Part, seconds: float) -> None:
        """Let time pass. Raises _Over at the end of time."""
        self._spend_until(part, self._now + seconds)

    def _spend_until(self, part: Part, until: float) -> None:
        """Let time pass, to the very moment: what is added to a time may not change it."""
        until = max(self._now, min(until, self._horizon))
        self.outcome.spent[part] += until - self._now
        self._pass(until)
        if until >= self._horizon:
            raise _Over

    def _pass(self, until: float) -> None:
        """Pay for the nodes until a time, and hold those of then."""
        while (coming := self._peek(0)) is not None and coming.seconds <= until:
            self._pay(coming.seconds)
            self._held = self._coming.popleft()
        self._pay(until)

    def _pay(self, until: float) -> None:
        seconds = until - self._now
        self.outcome.spot_seconds += self._held.spot * seconds
        self.outcome.on_demand_seconds += self._held.on_demand * seconds
        self.outcome.head_seconds += self._held.head * seconds
        self._now = until

    def _peek(self, index: int) -> Moment | None:
        """A moment to come."""
        while len(self._coming) <= index:
            moment = next(self._moments, None)
            if moment is None:
                return None
            self._coming.append(moment)
        return self._coming[index]

    def _future(self) -> Iterator[Moment]:
        """The moments until the end of time."""
        index = 0
        while (moment := self._peek(index)) is not None and moment.seconds < self._horizon:
            yield moment
            index += 1

    # One worker group

    def _generation(self) -> None:
        """A worker group, from waiting for its workers to its end."""
        workers = self._wait_for_workers()
        self.outcome.restarts += 1
        began = self._now
        loss = self._next_loss(workers)
        until = loss.seconds if loss is not None else NEVER
        grows_at = self._next_growth(workers, began, until)
        if self._start(until) and not self._train(workers, until, grows_at):
            self._worker_seconds += workers * (self._now - began)
            return  # to be more
        self._worker_seconds += workers * (self._now - began)
        assert loss is not None, "nothing else ends a worker group"
        self._fail(head_lost=loss.head_lost)

    def _wait_for_workers(self) -> int:
        """Wait for all workers, or for enough of them for as long as the driver has patience; how many there are."""
        choice, began = self._choice, self._now
        while True:
            there = self._held.workers if self._held.head else 0
            patient_until = began + self._times.patience
            if there >= choice.workers or (there >= choice.fewest and self._now >= patient_until):
                return min(there, choice.workers)
            coming = self._peek(0)
            change = coming.seconds if coming is not None else NEVER
            if there >= choice.fewest:
                change = min(change, patient_until)
            self._spend_until(Part.WAITING, change)

    def _next_loss(self, workers: int) -> Moment | None:
        """When one of a group's workers, or the head, is lost. Workers that are no part of the group are lost first."""
        idle = self._held.workers - workers
        before = self._held.workers
        for moment in self._future():
            idle = max(0, idle)
            if moment.head_lost or moment.lost > idle:
                return moment
            idle += moment.workers - before
            before = moment.workers
        return None

    def _next_growth(self, workers: int, began: float, until: float) -> float:
        """When there are more workers than in a group, if before `until`, and it is not too early to use them."""
        earliest = began + self._choice.resize_cooldown
        if workers >= self._choice.workers or earliest == NEVER:
            return NEVER
        steady = self._times.steady
        more_since = self._now if self._held.workers > workers else NEVER
        for moment in self._future():
            if moment.seconds >= until or moment.seconds >= max(more_since + steady, earliest):
                break
            more_since = min(more_since, moment.seconds) if moment.workers > workers else NEVER
        leaves = max(more_since + steady, earliest)
        return leaves if leaves < until else NEVER

    def _start(self, until: float) -> bool:
        """Start up and restore; False where a worker is lost meanwhile."""
        parts = [(Part.STARTUP, self._times.start_up)]
        if self._committed is not None:
            parts.append((Part.RESTORE, self._times.restore))
        for part, seconds in parts:
            self._spend_until(part, min(self._now + seconds, until))
            if self._now >= until:
                return False
        return True

    def _train(self, workers: int, until: float, grows_at: float) -> bool:
        """Steps and commits until a worker is lost (True) or the group leaves to be more (False)."""
        commits = _Commits(self._choice, self._times, self._now, workers, self._seconds_to_preemption())
        step_seconds = self._times.step_seconds(workers)
        notice_at = until - self._choice.notice if self._choice.notice else NEVER
        leaves_at = grows_at if grows_at < until - self._times.commit else NEVER
        while True:
            due = max(min(commits.due_at, notice_at, leaves_at), commits.busy_until)
            if not self._step_until(due, commits.steps_until_due(self.outcome.steps), until, step_seconds):
                self._take_in(commits.durable(self._now))
                return True
            self._take_in(commits.durable(self._now))
            state = _Saved(self.outcome.steps, self.outcome.spent[Part.PRODUCTIVE])
            if self.outcome.steps == self._steps:
                self._wait_for_commit(until)
                self.outcome.finished = self._now < until
                if self.outcome.finished:
                    raise _Over
                return True
            if self._now < commits.busy_until:
                continue  # one commit at a time: the next one is due after as many steps again
            if self._now >= leaves_at:
                self._wait_for_commit(until)
                self._take_in(state if self._now < until else None)
                return self._now >= until
            begun = self._now
            notice_at = notice_at if begun < notice_at else NEVER
            self._spend_until(Part.CHECKPOINT_STALL, min(begun + self._times.stall, until))
            commits.begin(state, begun)

    def _wait_for_commit(self, until: float) -> None:
        durable = self._now + max(self._times.stall, self._times.commit)
        self._spend_until(Part.CHECKPOINT_STALL, min(durable, until))

    def _step_until(self, due: float, steps_due: float, until: float, step_seconds: float) -> bool:
        """Make steps until a commit is due after one; False where a worker is lost before."""
        whole = step_seconds + self._times.data_wait
        left = NEVER if self._steps is None else self._steps - self.outcome.steps
        wanted = min(max(1, math.ceil((due - self._now) / whole)) if due < NEVER else NEVER, steps_due, left)
        end = min(until, self._horizon)
        made = min(wanted, (end - self._now) // whole)
        count = int(made)
        self.outcome.steps += count
        self.outcome.spent[Part.PRODUCTIVE] += count * step_seconds
        self.outcome.spent[Part.DATA_WAIT] += count * self._times.data_wait
        self._pass(self._now + count * whole)
        if made == wanted and self._now < end:
            return True
        self._spend_until(Part.LOST if until <= self._horizon else Part.PRODUCTIVE, end)
        return False

    def _take_in(self, durable: _Saved | None) -> None:
        self._committed = durable or self._committed

    def _seconds_to_preemption(self) -> float:
        return seconds_to_preemption(self._worker_seconds, self._losses)

    # Its end

    def _fail(self, *, head_lost: bool) -> None:
        """Go back to the last commit, and wait as the retry policy says."""
        self._losses += 1
        self._streak = 1 if self.outcome.steps > self._highest else self._streak + 1
        self._highest = max(self._highest, self.outcome.steps)
        kept = self._committed or _Saved()
        lost = self.outcome.spent[Part.PRODUCTIVE] - kept.productive
        self.outcome.spent[Part.PRODUCTIVE] -= lost
        self.outcome.spent[Part.LOST] += lost
        self.outcome.steps_lost += self.outcome.steps - kept.steps
        self.outcome.steps = kept.steps
        if head_lost:
            self._spend(Part.WAITING, self._times.head_loss)
            while not self._held.head:
                coming = self._peek(0)
                self._spend_until(Part.WAITING, coming.seconds if coming is not None else NEVER)
            self._spend(Part.STARTUP, self._times.attempt)
            return
        self._spend(Part.LOST, self._times.detection)
        pause = backoff_seconds(self._streak - 1, self._times.backoff, self._times.longest_backoff)
        self._spend(Part.WAITING, pause)


class _Commits:
    """When a worker group commits, as the trainer decides it, and what of it is durable."""

    def __init__(self, choice: Choice, times: Times, now: float, workers: int, seconds_to_preemption: float) -> None:
        self._every = choice.every
        self._times = times
        self._between_failures = mean_seconds_between_failures(seconds_to_preemption, workers)
        self._interval = MINIMUM_INTERVAL_SECONDS if choice.every == "auto" else NEVER
        if isinstance(choice.every, float):
            self._interval = choice.every
        self._flying: _Saved | None = None
        self.due_at = now + self._interval
        self.busy_until = now

    def steps_until_due(self, steps: int) -> float:
        """Steps until the next commit, where they are counted."""
        return self._every - steps % self._every if isinstance(self._every, int) else NEVER

    def begin(self, state: _Saved, now: float) -> None:
        """Begin to commit a state."""
        self._flying = state
        self.busy_until = now + max(self._times.stall, self._times.commit)
        if self._every == "auto":
            self._interval = background_interval_seconds(self._times.stall, self._times.commit, self._between_failures)
        self.due_at = now + self._interval

    def durable(self, now: float) -> _Saved | None:
        """The state whose commit has ended by now, once."""
        if self._flying is None or now < self.busy_until:
            return None
        durable, self._flying = self._flying, None
        return durable
