"""The agents on the nodes of a cluster, as the driver has them: mustered, asked, and led through worker groups."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from spotune.errors import InfrastructureError
from spotune_trainer.driver.scaling import slots_by_node
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.node_agent import GRACE_SECONDS, NodeAgent, NodeFacts
from spotune_trainer.worker_group.rank_process import Place, RankEnd
from spotune_trainer.worker_group.result import GroupEnd, Room, explain

logger = logging.getLogger("spotune.driver")

_CALLS_AT_ONCE = 8
_ANSWER_SECONDS = 30.0
_IMPORT_SECONDS = 300.0
"""So long may the first process of a node take, which waits for the imports."""
_NEXT_TRY_SECONDS = 5.0
"""An agent that died is not followed by another one on its node before that."""


def draining_nodes() -> dict[str, float]:
    """Nodes of the Ray cluster that are going away, each with its deadline in seconds since the epoch (0: none).

    What Ray Train's own watcher of preemptions asks; there is no public way to it.
    """
    return {node: deadline / 1000 for node, deadline in ray_state.get_draining_nodes().items()}


@dataclass
class _Agent:
    """One agent.

    Attributes:
        node: Ray's id of its node.
        slots: ranks that it has room for.
        gpus: whether they train on GPUs.
        handle: the actor.
        there: the reference of its facts, once it is there.
        gone: the reference of a call that ends with it.
        places: of the ranks of the group that runs.
    """

    node: str
    slots: int
    gpus: bool
    handle: Any
    there: Any
    gone: Any
    places: list[Place] = field(default_factory=list)

    def is_there(self) -> bool:
        return bool(ray.wait([self.there], timeout=0)[0])

    def is_gone(self) -> bool:
        return bool(ray.wait([self.gone], timeout=0)[0])

    def facts(self) -> NodeFacts:
        facts: NodeFacts = ray.get(self.there, timeout=_ANSWER_SECONDS)
        return facts


class Agents:
    """One agent on each node that stays; what it takes to start a rank is ready on all of them at all times.

    Args:
        nodes: the cluster's nodes, as `ray.nodes()` gives them.
        draining: those that are going away, with their deadlines.
    """

    def __init__(
        self,
        nodes: Callable[[], Sequence[Mapping[str, Any]]] = ray.nodes,
        draining: Callable[[], Mapping[str, float]] = draining_nodes,
    ) -> None:
        self._draining = draining
        self._nodes = nodes
        self._agents: dict[str, _Agent] = {}
        self._not_before: dict[str, float] = {}
        self._lock = threading.RLock()

    def muster(self, gpus: bool) -> Room:
        """Have an agent on every node that stays and, but for those of the group that runs, on no other."""
        with self._lock:
            room = slots_by_node(self._nodes(), gpus)
            for node in self._draining():
                room.pop(node, None)
            for agent in list(self._agents.values()):
                if agent.is_gone():
                    self._bury(agent)
                elif not agent.places and (agent.gpus, agent.slots) != (gpus, room.get(agent.node)):
                    self._dismiss(agent)
            for node, slots in room.items():
                if node not in self._agents and time.monotonic() >= self._not_before.get(node, 0.0):
                    self._agents[node] = _start(node, slots, gpus)
            ready = [agent.slots for agent in self._agents.values() if agent.node in room and agent.is_there()]
            return Room(sum(room.values()), sum(ready))

    def draining(self) -> Mapping[str, float]:
        """Nodes that are going away, each with its deadline in seconds since the epoch (0: none)."""
        return self._draining()

    def occupied(self) -> set[str]:
        """Nodes that ranks of the running group are on."""
        with self._lock:
            return {agent.node for agent in self._agents.values() if agent.places}

    def worker_memory_bytes(self, workers: int, gpus: bool) -> int:
        """Memory of one of `workers` ranks: its GPU's, or its share of a node's; asked of an agent that is there.

        Raises:
            InfrastructureError: none of them answers.
        """
        with self._lock:
            there = [agent for agent in self._agents.values() if agent.is_there()]
        for agent in there:
            with suppress(RayError):
                if gpus:
                    return int(ray.get(agent.handle.gpu_memory_bytes.remote(), timeout=_IMPORT_SECONDS))
                return agent.facts().memory_bytes // min(agent.slots, workers)
        raise InfrastructureError("no node says how much memory a worker has: the workers were lost meanwhile")

    def run_group(self, task: WorkerTask, world_size: int) -> GroupEnd:
        """Run one generation on `world_size` ranks until it ends."""
        ends: list[RankEnd] = []
        lost: dict[int, str] = {}
        text = f"there is no room for {world_size} workers any more"
        try:
            if self._take_places(world_size):
                text = self._lead(task, ends, lost)
        except RayError as error:
            text = str(error)
        finally:
            with self._lock:
                for agent in self._agents.values():
                    agent.places = []
        return explain(task.logs, ends, lost, text)

    def _take_places(self, world_size: int) -> bool:
        """Give each rank its place, on as few nodes as can be; whether there is one for all."""
        with self._lock:
            ready = [agent for agent in self._agents.values() if agent.is_there() and not agent.is_gone()]
            ready.sort(key=lambda agent: (-agent.slots, agent.node))
            shares: list[tuple[_Agent, range]] = []
            taken = 0
            for agent in ready:
                share = range(taken, min(taken + agent.slots, world_size))
                if share:
                    shares.append((agent, share))
                    taken = share.stop
            if taken < world_size:
                return False
            first = shares[0][0]
            address = first.facts().address
            port = ray.get(first.handle.free_port.remote(), timeout=_ANSWER_SECONDS)
            for agent, share in shares:
                agent.places = [
                    Place(rank, rank - share.start, len(share), world_size, address, port) for rank in share
                ]
            return True

    def _lead(self, task: WorkerTask, ends: list[RankEnd], lost: dict[int, str]) -> str:
        """Have all agents run their ranks to the end; how they ended goes to `ends` and `lost`.

        Returns:
            str: what Ray said last about a lost agent.
        """
        with self._lock:
            leading = [agent for agent in self._agents.values() if agent.places]
        running = {agent.handle.run.remote(task, agent.places): agent for agent in leading}
        text, patience = "", None
        while running:
            done, _ = ray.wait(list(running), num_returns=1, timeout=patience)
            for call in done or list(running):  # who does not answer any more is as good as gone
                agent = running.pop(call)
                try:
                    ended: list[RankEnd] = ray.get(call, timeout=0)
                    failed = any(end.status for end in ended)
                    ends += ended
                except RayError as error:
                    text, failed = str(error), True
                    lost |= {place.rank: type(error).__name__ for place in agent.places}
                    self._dismiss(agent)
                if failed and patience is None:
                    patience = GRACE_SECONDS + _ANSWER_SECONDS
                    for other in running.values():
                        other.handle.end.remote(task.generation)
        return text

    def _dismiss(self, agent: _Agent) -> None:
        """End an agent."""
        with suppress(RayError):
            ray.kill(agent.handle)
        with self._lock:
            self._agents.pop(agent.node, None)

    def _bury(self, agent: _Agent) -> None:
        """Forget an agent that has died, and say why."""
        try:
            ray.get(agent.gone)
        except RayError as error:
            logger.warning("the agent on node %s is gone: %s", agent.node, str(error).strip().splitlines()[0])
        self._agents.pop(agent.node, None)
        self._not_before[agent.node] = time.monotonic() + _NEXT_TRY_SECONDS


def _start(node: str, slots: int, gpus: bool) -> _Agent:
    """An agent that takes all slots of a node: Ray drains nodes with nothing to do at once."""
    actor: Any = ray.remote(NodeAgent)
    handle = actor.options(
        num_cpus=0 if gpus else slots,
        num_gpus=slots if gpus else 0,
        max_concurrency=_CALLS_AT_ONCE,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(gpus)
    return _Agent(node, slots, gpus, handle, there=handle.facts.remote(), gone=handle.stay.remote())
