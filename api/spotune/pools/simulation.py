"""A simulation of a job in several pools, with the operator's own choice between them.

Each pool has a trace of its nodes. Time jumps from one event to the next: a trace or a choice changes, a worker gets
ready, a group forms or ends. The operator and KubeRay react within `REACTION` seconds. A loss has no notice and undoes
the training since the last durable commit. Workers that the operator moves commit first, so nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from spotune.plan.checkpoint_interval import background_interval_seconds, mean_seconds_between_failures
from spotune.pools.choice import choose
from spotune.pools.terms import Choice, Pool, PoolMemory, Wish, Worker
from spotune.simulate.terms import NEVER, Timings
from spotune.simulate.trace import Trace

REACTION: Final = 1.0
"""Seconds until a change of pods is made."""
TO_PREEMPTION: Final = 6 * 3600.0
"""Assumed mean seconds until one worker is preempted, for `checkpoint.every: auto`; `spotune plan` assumes the same."""
_MOST_REPEATS: Final = 100
"""A trace is repeated no more often; then the job is taken to end never."""


@dataclass(frozen=True)
class PoolSupply:
    """A pool, and the nodes that it has.

    Attributes:
        pool: The pool.
        trace: Its nodes over time; None: as many as asked for, at any time.
        price: Of a node and hour; None if it is not known.
    """

    pool: Pool
    trace: Trace | None
    price: float | None = None


@dataclass
class PoolUse:
    """What became of one pool.

    Attributes:
        node_seconds: Seconds of nodes with workers, from the arrival of the node: what a cloud bills.
        any_seconds: Seconds in which it had a node for at least one worker.
        all_seconds: Seconds in which it had nodes for all of the job's workers.
        refusals: How often no node came in time.
        losses: Number of workers whose node was taken away.
    """

    node_seconds: float = 0.0
    any_seconds: float = 0.0
    all_seconds: float = 0.0
    refusals: int = 0
    losses: int = 0


@dataclass
class PoolsRun:
    """The result of a simulation.

    Attributes:
        seconds: Wall-clock seconds.
        productive: Seconds of steps that were not undone.
        staffed: Seconds in which at least the minimum of workers was ready.
        steps: Completed steps that were not undone.
        steps_lost: Steps that were undone.
        groups: Number of worker groups.
        moves: How often workers that were ready changed between pools.
        finished: Whether all steps were completed; None if no number of steps was asked for.
        used: By name of the pool, in the order in which they are tried.
    """

    used: dict[str, PoolUse]
    seconds: float = 0.0
    productive: float = 0.0
    staffed: float = 0.0
    steps: float = 0.0
    steps_lost: float = 0.0
    groups: int = 0
    moves: int = 0
    finished: bool | None = None

    def cost(self, supplies: Sequence[PoolSupply]) -> float | None:
        """Price of all nodes; None if a pool that was used has no price."""
        total = 0.0
        for supply in supplies:
            seconds = self.used[supply.pool.name].node_seconds
            if seconds and supply.price is None:
                return None
            total += seconds / 3600 * (supply.price or 0.0)
        return total


def simulate_pools(
    supplies: Sequence[PoolSupply],
    wish: Wish,
    times: Timings,
    *,
    checkpoint_every: str | float | int = "auto",
    steps: int | None = None,
) -> PoolsRun:
    """Simulate a job.

    Args:
        supplies: The pools, the best first; at least one has a trace.
        wish: What the job asks for.
        times: How long everything takes. `join` is the time from a node until its worker is ready.
        checkpoint_every: `checkpoint.every`: auto, seconds, or a number of steps.
        steps: Steps of the job, for which traces are repeated; None: as many as fit into the shortest trace.
    """
    return _Simulation(supplies, wish, times, checkpoint_every, steps).run()


@dataclass
class _Nodes:
    """The nodes of a pool over time: the current number, and when it changes next."""

    changes: Iterator[tuple[float, int]]
    count: float = math.inf
    until: float = NEVER
    following: float = math.inf

    @classmethod
    def of(cls, trace: Trace | None) -> _Nodes:
        if trace is None:
            return cls(iter(()))
        nodes = cls(trace.repeated())
        nodes.until, nodes.following = next(nodes.changes)
        nodes.advance(0.0)
        return nodes

    def advance(self, now: float) -> None:
        while self.until <= now:
            self.count = self.following
            self.until, self.following = next(self.changes, (NEVER, self.count))


@dataclass
class _Group:
    """A worker group.

    Attributes:
        members: Names of its workers.
        trains_from: Time of its first step.
        done_before: Steps that were done before it.
    """

    members: frozenset[str]
    trains_from: float
    done_before: float


@dataclass
class _Simulation:
    supplies: Sequence[PoolSupply]
    wish: Wish
    times: Timings
    checkpoint_every: str | float | int
    steps: int | None
    now: float = 0.0
    workers: dict[str, Worker] = field(default_factory=dict)
    nodes_since: dict[str, float] = field(default_factory=dict)
    memory: Mapping[str, PoolMemory] = field(default_factory=dict)
    moved_at: float | None = None
    group: _Group | None = None
    may_start: float = 0.0
    waits_since: float | None = None
    done: float = 0.0
    created: int = 0

    def run(self) -> PoolsRun:
        pools = [supply.pool for supply in self.supplies]
        nodes = {supply.pool.name: _Nodes.of(supply.trace) for supply in self.supplies}
        lengths = [supply.trace.seconds for supply in self.supplies if supply.trace is not None]
        end = min(lengths) if self.steps is None else _MOST_REPEATS * max(lengths)
        self._run = PoolsRun({pool.name: PoolUse() for pool in pools}, finished=None if self.steps is None else False)
        while True:
            for each in nodes.values():
                each.advance(self.now)
            self._take_and_give(nodes)
            choice = choose(pools, self.workers.values(), self.memory, self.wish, moved_at=self.moved_at, now=self.now)
            has_changed = self._reconcile(choice)
            self._regroup()
            until = min(end, self._next_event(nodes, choice), self.now + REACTION if has_changed else NEVER)
            self._pass(until, nodes)
            if self.steps is not None and self.done >= self.steps - 1e-6:
                self._run.finished = True
                break
            if self.now >= end:
                break
        self._run.seconds, self._run.steps = self.now, self.done
        return self._run

    # Nodes and workers

    def _take_and_give(self, nodes: Mapping[str, _Nodes]) -> None:
        """Take nodes away that a pool no longer has, the newest first, and give free ones to those who wait longest."""
        for name, pool_nodes in nodes.items():
            own = sorted((each for each in self.workers.values() if each.pool == name), key=lambda each: each.created)
            held = sorted((each for each in own if each.has_node), key=lambda each: self.nodes_since[each.name])
            gone = held[int(min(pool_nodes.count, len(held))) :]
            for worker in gone:
                self._remove(worker.name)
                self._run.used[name].losses += 1
            self._stop_group([worker.name for worker in gone], is_loss=True)
            free = pool_nodes.count - (len(held) - len(gone))
            for worker in (each for each in own if not each.has_node):
                if free < 1:
                    break
                free -= 1
                self.workers[worker.name] = replace(worker, has_node=True)
                self.nodes_since[worker.name] = self.now
        for name, since in self.nodes_since.items():
            if self.now >= since + self.times.join:
                self.workers[name] = replace(self.workers[name], ready=True)

    def _reconcile(self, choice: Choice) -> bool:
        """Remove the named workers and create missing ones; returns whether there was anything to do."""
        for name, memory in choice.memory.items():
            before = self.memory.get(name, PoolMemory())
            self._run.used[name].refusals += memory.refused_at is not None and memory.refused_at != before.refused_at
        self.memory, has_changed = choice.memory, False
        self._run.moves += choice.moved_at is not None and choice.moved_at != self.moved_at
        self.moved_at = choice.moved_at
        for name, memory in choice.memory.items():
            leaving = [worker for worker in memory.leaving if worker in self.workers]
            for worker in leaving:
                self._remove(worker)
            self._stop_group(leaving, is_loss=False)
            present = sum(worker.pool == name for worker in self.workers.values())
            for _ in range(choice.replicas[name] - present):
                self.created += 1
                worker = f"{name}-{self.created}"
                self.workers[worker] = Worker(worker, name, self.now)
                has_changed = True
            has_changed |= bool(leaving)
        return has_changed

    def _remove(self, worker: str) -> None:
        del self.workers[worker]
        self.nodes_since.pop(worker, None)

    # Worker groups

    def _stop_group(self, gone: Sequence[str], *, is_loss: bool) -> None:
        """End the group if one of its workers is gone; a loss undoes the training since the last durable commit."""
        group = self.group
        if group is None or not group.members.intersection(gone):
            return
        if is_loss:
            interval = self._interval(len(group.members))
            lasted = max(0.0, self.now - group.trains_from)
            committed = max(0, math.floor((lasted - self.times.commit) / interval)) * interval
            kept = group.done_before + committed * self._rate(len(group.members))
            self._run.steps_lost += max(0.0, self.done - kept)
            self._run.productive -= max(0.0, self.done - kept) * self._step_seconds(len(group.members))
            self.done = min(self.done, kept)
        self.group, self.waits_since = None, None
        self.may_start = self.now + (self.times.detection if is_loss else self.times.commit)

    def _regroup(self) -> None:
        """Start a group with the workers of the kind that has the most, or a larger one in its place."""
        ready = self._slots()
        if self.group is None:
            if len(ready) < self.wish.minimum:
                self.waits_since = None
                return
            self.waits_since = self.now if self.waits_since is None else self.waits_since
            is_whole = len(ready) >= self.wish.count
            if self.now >= self.may_start and (is_whole or self.now >= self.waits_since + self.times.patience):
                self._start(ready)
        elif self._may_grow(ready):
            self._start(ready)

    def _may_grow(self, ready: frozenset[str]) -> bool:
        group = self.group
        return (
            group is not None and len(ready) > len(group.members) and self.now >= group.trains_from + self.wish.cooldown
        )

    def _start(self, ready: frozenset[str]) -> None:
        first = self.times.first_start_up
        start_up = self.times.start_up if self._run.groups or first is None else first
        trains_from = self.now + start_up + (self.times.restore if self.done else 0.0)
        self.group = _Group(ready, trains_from, self.done)
        self._run.groups += 1

    def _slots(self) -> frozenset[str]:
        """The ready workers of one kind: of the group's if that has as many, else of the kind with the most."""
        kinds = {supply.pool.name: supply.pool.kind for supply in self.supplies}
        by_kind: dict[str, list[str]] = {}
        for worker in self.workers.values():
            if worker.ready:
                by_kind.setdefault(kinds[worker.pool], []).append(worker.name)
        members = self.group.members if self.group is not None else frozenset()
        best = max(by_kind.values(), key=lambda names: (len(names), len(members.intersection(names))), default=[])
        most = sorted(best, key=lambda name: (name not in members, self.nodes_since[name]))
        return frozenset(most[: self.wish.count])

    # Time

    def _step_seconds(self, workers: int) -> float:
        return self.times.step_seconds(workers) + self.times.data_wait

    def _rate(self, workers: int) -> float:
        """Steps per second, with the stalls of commits."""
        return max(0.0, 1 - self.times.stall / self._interval(workers)) / self._step_seconds(workers)

    def _interval(self, workers: int) -> float:
        """Seconds between two commits."""
        if isinstance(self.checkpoint_every, int):
            return self.checkpoint_every * self._step_seconds(workers)
        if isinstance(self.checkpoint_every, float):
            return self.checkpoint_every
        between = mean_seconds_between_failures(TO_PREEMPTION, workers)
        return background_interval_seconds(self.times.stall, self.times.commit, between)

    def _next_event(self, nodes: Mapping[str, _Nodes], choice: Choice) -> float:
        times = [each.until for each in nodes.values()]
        times += [choice.next_change if choice.next_change is not None else NEVER]
        times += [since + self.times.join for since in self.nodes_since.values()]
        if self.group is None:
            times += [self.may_start, (self.waits_since or 0.0) + self.times.patience]
        else:
            times.append(self.group.trains_from + self.wish.cooldown)
            if self.steps is not None:
                rate = self._rate(len(self.group.members))
                begin = max(self.now, self.group.trains_from)
                times.append(begin + (self.steps - self.done) / rate if rate else NEVER)
        return min((each for each in times if each > self.now), default=NEVER)

    def _pass(self, until: float, nodes: Mapping[str, _Nodes]) -> None:
        """Let time pass: train, and pay for nodes."""
        seconds = until - self.now
        if self.group is not None:
            trained = max(0.0, until - max(self.now, self.group.trains_from))
            steps = trained * self._rate(len(self.group.members))
            self.done += steps
            self._run.productive += steps * self._step_seconds(len(self.group.members))
        if len(self._slots()) >= self.wish.minimum:
            self._run.staffed += seconds
        for supply in self.supplies:
            name = supply.pool.name
            used, count = self._run.used[name], nodes[name].count
            used.node_seconds += seconds * sum(self.workers[each].pool == name for each in self.nodes_since)
            used.any_seconds += seconds if count >= 1 else 0.0
            used.all_seconds += seconds if count >= self.wish.count else 0.0
        self.now = until
