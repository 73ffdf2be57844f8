"""Which pool carries which worker. A pure function, called again whenever a pod or the time has changed.

The pools come in the order in which they are tried, the cheapest first. The rules:

- Workers that are missing wait for nodes of the first pool that has not refused and has room, then of the next one.
- If a worker has no node after the patience of its pool, the pool has refused: its waiting workers go to the next pool.
  It is left alone, each time for twice as long, then probed with one worker more. While workers are missing that no
  pool takes, every pool that has refused is probed.
- Once all workers have nodes, a better pool is probed, or filled if it has not refused. As soon as its workers are
  ready, as many of the worst pools are released: a move. Between two moves passes at least the cooldown.
- Workers of different kinds (GPU types) never train together. So another kind gets a whole group of its own beside the
  present one, and takes over when it is complete, or larger than the present one, which lacks workers.

Workers that are to be removed are named, and remembered until they are gone: the next call must not count them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from spotune.pools.terms import Choice, Pool, PoolMemory, Wish, Worker, pause_seconds, without_old_refusals

STARTING_SECONDS: Final = 600.0
"""A worker that has a node and is not ready after so long is not waited for."""


def choose(
    pools: Sequence[Pool],
    workers: Iterable[Worker],
    memory: Mapping[str, PoolMemory],
    wish: Wish,
    *,
    moved_at: float | None,
    now: float,
) -> Choice:
    """The desired workers of each pool.

    Args:
        pools: The pools, the best first.
        workers: The worker pods, also those that are being deleted.
        memory: What the last call returned; a pool without an entry has not refused.
        wish: What the job asks for.
        moved_at: As the last call returned it.
        now: Unix time.
    """
    chooser = _Chooser(pools, workers, memory, wish, moved_at, now)
    return chooser.choice()


def unchanged(
    pools: Sequence[Pool], workers: Iterable[Worker], memory: Mapping[str, PoolMemory], moved_at: float | None
) -> Choice:
    """The choice that leaves all workers where they are: none is created, moved or refused.

    Args:
        pools: The pools.
        workers: The worker pods, also those that are being deleted.
        memory: What the last choice returned.
        moved_at: As the last choice returned it.
    """
    staying, remembered = dict.fromkeys((pool.name for pool in pools), 0), {}
    known = list(workers)
    for pool in pools:
        before = memory.get(pool.name, PoolMemory())
        own = [worker for worker in known if worker.pool == pool.name]
        leaving = [worker.name for worker in own if worker.is_going or worker.name in before.leaving]
        staying[pool.name] = len(own) - len(leaving)
        remembered[pool.name] = replace(before, leaving=tuple(sorted(leaving)))
    return Choice(staying, remembered, moved_at, next_change=None)


@dataclass
class _State:
    """A pool during one choice.

    Attributes:
        pool: The pool.
        memory: What is remembered of it.
        held: Its workers with a node that stay, the oldest first.
        waiting: Its workers without a node that stay, the oldest first.
        leaving: Names of workers that are being removed.
        desired: Desired number of workers without a node.
    """

    pool: Pool
    memory: PoolMemory
    held: list[Worker] = field(default_factory=list)
    waiting: list[Worker] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)
    desired: int = 0

    @property
    def vacant(self) -> int:
        return max(0, self.pool.most - len(self.held))

    @property
    def is_open(self) -> bool:
        """Whether it has not refused, or has given a node since."""
        refused_at = self.memory.refused_at
        return refused_at is None or any(worker.created >= refused_at for worker in self.held)

    def is_due(self, now: float) -> bool:
        return self.memory.retry_at is None or now >= self.memory.retry_at

    def new_memory(self) -> PoolMemory:
        return replace(self.memory, leaving=tuple(sorted(self.leaving)))

    def remove(self, worker: Worker) -> None:
        self.leaving.append(worker.name)
        (self.held if worker.has_node else self.waiting).remove(worker)


class _Chooser:
    def __init__(
        self,
        pools: Sequence[Pool],
        workers: Iterable[Worker],
        memory: Mapping[str, PoolMemory],
        wish: Wish,
        moved_at: float | None,
        now: float,
    ) -> None:
        self._wish, self._moved_at, self._now = wish, moved_at, now
        self._states = [
            _State(pool, without_old_refusals(pool, memory.get(pool.name, PoolMemory()), now)) for pool in pools
        ]
        by_name = {state.pool.name: state for state in self._states}
        for worker in sorted(workers, key=lambda each: (each.created, each.name)):
            state = by_name.get(worker.pool)
            if state is None:
                continue
            if worker.is_going or worker.name in state.memory.leaving:
                state.leaving.append(worker.name)
            else:
                (state.held if worker.has_node else state.waiting).append(worker)

    @property
    def _may_move(self) -> bool:
        return self._moved_at is None or self._now - self._moved_at >= self._wish.cooldown

    def choice(self) -> Choice:
        for state in self._states:
            self._notice_refusal(state)
        if self._wish.count:
            kind = self._kind_in_use()
            own = [state for state in self._states if state.pool.kind == kind]
            others = self._other_kinds(kind)
            missing = self._fill(own)
            attempted = self._try_other_kinds(own, others, missing)
            moved = self._release_surplus(own) + self._release_other_kinds(own, others, attempted)
            if moved:
                self._moved_at = self._now
        for state in self._states:
            for worker in state.waiting[state.desired :]:
                state.remove(worker)
        return Choice(
            replicas={state.pool.name: len(state.held) + state.desired for state in self._states},
            memory={state.pool.name: state.new_memory() for state in self._states},
            moved_at=self._moved_at,
            next_change=self._next_change(),
        )

    def _notice_refusal(self, state: _State) -> None:
        """If no node has come in time, remember it; the workers that wait here leave."""
        if not any(self._now - worker.created >= state.pool.after for worker in state.waiting):
            return
        refusals = state.memory.refusals + 1
        retry_at = self._now + pause_seconds(state.pool, refusals)
        state.memory = PoolMemory(refusals, self._now, retry_at)
        for worker in list(state.waiting):
            state.remove(worker)

    # Kinds

    def _kind_in_use(self) -> str:
        """The kind with the most workers that are ready, else with a node; before there are any, of the best pool."""
        held = [worker for state in self._states for worker in state.held]
        if not held:
            best = next((state for state in self._states if state.is_open and state.vacant), self._states[0])
            return best.pool.kind
        kind_of = {state.pool.name: state.pool.kind for state in self._states}

        def rank(kind: str) -> tuple[int, int, float]:
            own = [worker for worker in held if kind_of[worker.pool] == kind]
            return sum(worker.ready for worker in own), len(own), -min(worker.created for worker in own)

        return max(dict.fromkeys(kind_of[worker.pool] for worker in held), key=rank)

    def _other_kinds(self, kind: str) -> list[list[_State]]:
        """The pools of each other kind, in the order of its best pool."""
        kinds = dict.fromkeys(state.pool.kind for state in self._states if state.pool.kind != kind)
        return [[state for state in self._states if state.pool.kind == other] for other in kinds]

    # How many workers wait in each pool

    def _fill(self, own: Sequence[_State]) -> int:
        """Set how many workers wait for nodes in each pool of the kind in use; returns how many no pool takes."""
        surplus = _held(own) - self._wish.count
        left, is_complete = max(0, -surplus), surplus >= 0
        replacing = max(0, surplus)
        for index, state in enumerate(own):
            replaceable = _held(own[index + 1 :]) - replacing if is_complete and self._may_move else 0
            needed = min(state.vacant, left if not is_complete else max(0, replaceable))
            if not state.is_open:
                state.desired = int(needed > 0 and state.is_due(self._now))
                replacing += state.desired if is_complete else 0
                continue
            state.desired = needed
            if is_complete:
                replacing += needed
            else:
                left -= needed
        if left:
            for state in own:
                if not state.is_open:
                    state.desired = min(1, state.vacant)
        return left

    def _try_other_kinds(
        self, own: Sequence[_State], others: Sequence[Sequence[_State]], missing: int
    ) -> Sequence[_State]:
        """Let workers wait in pools of another kind, if these are better or the present kind lacks workers.

        Returns:
            The pools of the kind that is filled; none if there is none.
        """
        ready = sum(worker.ready for state in own for worker in state.held)
        cannot_train = ready < self._wish.minimum
        lacks = missing > 0 and (self._may_move or cannot_train)
        is_complete = _held(own) >= self._wish.count
        worst = max((self._states.index(state) for state in own if state.held), default=-1)
        for kind in others:
            usable = kind
            if not lacks:
                usable = [state for state in kind if self._states.index(state) < worst]
                if not (is_complete and self._may_move and usable):
                    continue
            needed = self._wish.count - _held(kind)
            usable = [state for state in usable if state.is_open or state.is_due(self._now) or cannot_train]
            most = _held(kind) + sum(state.vacant for state in usable)
            if most < self._wish.count and not (lacks and most > _held(own)):
                continue
            for state in usable:
                share = min(state.vacant, max(0, needed))
                if state.is_open:
                    state.desired = share
                    needed -= share
                else:
                    state.desired = int(share > 0)
            has_begun = _held(kind) > 0 or any(state.is_open and state.desired for state in kind)
            is_possible = needed <= 0 or (lacks and _held(kind) > _held(own))
            if has_begun and (is_possible or any(state.is_open and state.desired for state in kind)):
                return kind
            if not lacks and any(state.desired for state in kind):
                break  # one kind after the other: two that are probed at once would both get nodes
        return []

    # Which workers are released

    def _release_surplus(self, own: Sequence[_State]) -> int:
        """Remove workers above the desired number from the worst pools, once their replacements are ready.

        Returns:
            The number of workers removed that were ready.
        """
        surplus = _held(own) - self._wish.count
        if surplus <= 0 or not self._may_move or any(state.desired and state.is_open for state in own):
            return 0
        if any(self._is_starting(state, worker) for state in own for worker in state.held):
            return 0
        spare = sum(worker.ready for state in own for worker in state.held) - self._wish.count
        released = 0
        for state in reversed(own):
            for worker in sorted(state.held, key=lambda each: (each.ready, -each.created)):
                if surplus == 0 or (worker.ready and spare <= 0):
                    return released
                state.remove(worker)
                surplus -= 1
                spare -= worker.ready
                released += worker.ready
        return released

    def _release_other_kinds(
        self, own: Sequence[_State], others: Sequence[Sequence[_State]], attempted: Sequence[_State]
    ) -> int:
        """Remove workers of kinds that are not filled; if the filled kind is complete, those of the present one.

        Returns:
            The number of workers removed that were ready.
        """
        trained_since = min(
            (worker.created for state in own for worker in state.held if worker.ready), default=self._now
        )
        released = sum(
            _release(state, before=trained_since) for kind in others if kind is not attempted for state in kind
        )
        ready = sum(worker.ready for state in attempted for worker in state.held)
        if not attempted or ready < self._wish.count or not self._may_move:
            return released
        for state in own:
            state.desired = 0
            released += _release(state, before=math.inf)
        return released

    def _is_starting(self, state: _State, worker: Worker) -> bool:
        return not worker.ready and self._now - worker.created < state.pool.after + STARTING_SECONDS

    def _next_change(self) -> float | None:
        times = [] if self._moved_at is None else [self._moved_at + self._wish.cooldown]
        for state in self._states:
            times += [worker.created + state.pool.after for worker in state.waiting]
            times += [worker.created + state.pool.after + STARTING_SECONDS for worker in state.held if not worker.ready]
            if state.memory.retry_at is not None:
                times.append(state.memory.retry_at)
        return min((each for each in times if each > self._now), default=None)


def _release(state: _State, before: float) -> int:
    """Remove all workers with a node; returns how many of them were ready, and created before this Unix time.

    Of a kind that is not in use, only such workers may have trained: those of a kind that was just tried are younger.
    """
    held = list(state.held)
    for worker in held:
        state.remove(worker)
    return sum(worker.ready and worker.created < before for worker in held)


def _held(states: Iterable[_State]) -> int:
    """Number of workers with a node."""
    return sum(len(state.held) for state in states)
