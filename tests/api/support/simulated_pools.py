"""A cluster in which pools run dry and come back, with KubeRay's rules for groups of worker pods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from spotune.pools.choice import choose
from spotune.pools.terms import Choice, Pool, PoolMemory, Wish, Worker


@dataclass
class SimulatedPools:
    """Pools with a number of free nodes each, and the pods of a job in them.

    Attributes:
        pools: The pools, the best first.
        wish: What the job asks for.
        nodes: Number of nodes that each pool has.
        now: Unix time.
        start_seconds: From a node to a worker that is ready.
        choice: The last one.
        moves: Times at which workers that were ready were removed.
    """

    pools: Sequence[Pool]
    wish: Wish
    nodes: dict[str, int]
    now: float = 1000.0
    start_seconds: float = 30.0
    workers: dict[str, Worker] = field(default_factory=dict)
    memory: dict[str, PoolMemory] = field(default_factory=dict)
    moved_at: float | None = None
    choice: Choice | None = None
    moves: list[float] = field(default_factory=list)
    created: int = 0

    def step(self, seconds: float) -> Choice:
        """Let time pass: nodes come and go, the operator decides, KubeRay makes it so."""
        self.now += seconds
        self._schedule()
        choice = choose(
            self.pools,
            list(self.workers.values()),
            self.memory,
            self.wish,
            moved_at=self.moved_at,
            now=self.now,
        )
        self.memory, self.moved_at, self.choice = dict(choice.memory), choice.moved_at, choice
        self._reconcile(choice)
        return choice

    def run(self, seconds: float, every: float = 10.0) -> None:
        """Let time pass in small steps."""
        for _ in range(int(seconds / every)):
            self.step(every)

    def ready(self) -> dict[str, int]:
        """Number of ready workers by pool; pools without any are left out."""
        found = [worker.pool for worker in self.workers.values() if worker.ready]
        return {pool.name: found.count(pool.name) for pool in self.pools if pool.name in found}

    def waiting(self) -> dict[str, int]:
        """Number of workers without a node by pool; pools without any are left out."""
        found = [worker.pool for worker in self.workers.values() if not worker.has_node]
        return {pool.name: found.count(pool.name) for pool in self.pools if pool.name in found}

    def _schedule(self) -> None:
        """Reclaim nodes that a pool no longer has, and give free ones to waiting workers, the oldest first."""
        for pool in self.pools:
            mine = sorted((each for each in self.workers.values() if each.pool == pool.name), key=lambda e: e.created)
            on_nodes = [worker for worker in mine if worker.has_node]
            for worker in on_nodes[self.nodes[pool.name] :]:
                del self.workers[worker.name]
            free = self.nodes[pool.name] - min(len(on_nodes), self.nodes[pool.name])
            for worker in [each for each in mine if not each.has_node][:free]:
                self.workers[worker.name] = replace(worker, has_node=True)
        for worker in self.workers.values():
            if worker.has_node and self.now - worker.created >= self.start_seconds:
                self.workers[worker.name] = replace(worker, ready=True)

    def _reconcile(self, choice: Choice) -> None:
        """As KubeRay: delete the named workers, then create or delete any until the number is right."""
        for pool in self.pools:
            for name in choice.memory[pool.name].leaving:
                worker = self.workers.pop(name, None)
                if worker is not None and worker.ready:
                    self.moves.append(self.now)
            mine = sorted(each.name for each in self.workers.values() if each.pool == pool.name)
            assert len(mine) <= choice.replicas[pool.name], "KubeRay would delete any of the workers"
            for _ in range(choice.replicas[pool.name] - len(mine)):
                self.created += 1
                name = f"{pool.name}-{self.created}"
                self.workers[name] = Worker(name, pool.name, self.now)
