"""The driver's pool of node agents: one on each node of the cluster, which runs the ranks of that node.

A Ray actor (`node_proxy.py`) connects the driver to each of them. The agents themselves outlive driver and head, so the
next driver can go on with a worker group that still trains.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from spotune.errors import InfrastructureError
from spotune.retry import FailureCause
from spotune_trainer.bucket.link import link_of
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.task import RankPlacement, RankResult, WorkerTask
from spotune_trainer.worker_group.fitness.node_fitness import NodeFitness
from spotune_trainer.worker_group.node_agent import GRACE_SECONDS, GRACE_SECONDS_OF_KEPT
from spotune_trainer.worker_group.node_proxy import NodeProxy, calls_function
from spotune_trainer.worker_group.node_state import NodeAddresses, NodeGroup
from spotune_trainer.worker_group.ray_nodes import (
    REPLY_SECONDS,
    RayAgent,
    RelayedNode,
    dead_nodes,
    draining_nodes,
    slots_by_node,
    slots_of_one_kind,
)
from spotune_trainer.worker_group.relay import Relay
from spotune_trainer.worker_group.result import (
    Failed,
    FoundGroup,
    GroupResult,
    Slots,
    Yielded,
    classify_exit,
    found_group,
)

logger = logging.getLogger("spotune.driver")

_CALLS_AT_ONCE = 8
_EXIT_SECONDS = 2.0
"""An agent that does not end within this time is left to itself; without a driver it ends later."""
_IMPORT_SECONDS = 300.0
"""Timeout of the first process on a node, which waits for the imports of the fork server."""
_RESTART_SECONDS = 5.0
"""Delay before a dead agent is replaced on its node."""
_KEEP_PROCESSES = "SPOTUNE_KEEP_RANK_PROCESSES"
"""Environment variable of the driver; 1: processes are kept. Not the default until it is tried on GPUs (ADR 57)."""


class AgentPool:
    """Keeps one agent on each node that is not draining, so that a rank can be forked there at any time.

    The Ray references of four calls serve as events, which the pool polls with `ray.wait`:

        pool                                   NodeProxy (actor), which passes the calls on to NodeAgent
          | -- info() ---------------------------> |   info_ref resolves: started, imports are under way
          | -- import_modules() -----------------> |   imported_ref resolves: a rank starts without imports
          | -- block_forever() ------------------> |   death_ref resolves with an error: agent or node is dead
          | -- run_ranks(task, placements, ...) -> |   one call for each group; resolves with its RankResults,
          |                                        |   or with an error if the agent dies meanwhile
          | -- abort(generation) ----------------> |   a rank elsewhere has failed: run_ranks ends within a grace period

    An agent that dies is replaced. An agent on a draining node is kept while it runs ranks, then ended.

    A group of an earlier driver may still run. `find_group` returns it once the agents of all its ranks are known, and
    `adopt_group` then waits for its results as `run_group` does.

    With `SPOTUNE_KEEP_RANK_PROCESSES=1`, the other ranks keep their processes for the next group after a lost rank, and
    after a group that yielded. After any other failure all processes are new ones, because their state may be a part of
    the problem.

    A node is used once it has been checked (`fitness/node_fitness.py`). An unfit one is treated like a draining one.

    Args:
        directory: of the job: agents of another one are not used.
        nodes: the cluster's nodes, as `ray.nodes()` returns them.
        draining: the draining ones, with their deadlines.
    """

    def __init__(
        self,
        directory: Path,
        nodes: Callable[[], Sequence[Mapping[str, Any]]] = ray.nodes,
        draining: Callable[[], Mapping[str, float]] = draining_nodes,
    ) -> None:
        self._directory = str(directory)
        link = link_of(JobDirectory(directory))
        self._bucket = link.url if link is not None else ""
        self._relay = Relay(JobDirectory(directory), self._relayed) if link is not None else None
        self._draining = draining
        self._fitness = NodeFitness(JobDirectory(directory))
        self._nodes = nodes
        self._agents: dict[str, RayAgent] = {}
        self._not_before: dict[str, float] = {}
        self._usable: dict[str, int] = {}
        self._lock = threading.RLock()
        self._reuse_processes = False
        self._has_placed = False
        self._secret = secrets.token_bytes(32)
        self._driver = uuid.uuid4().hex
        if self._relay is not None:
            self._relay.start()

    def ensure(self, gpus: bool) -> Slots:
        """Start missing agents, and remove dead ones and idle ones on nodes that are draining or have changed.

        Returns:
            Slots of nodes with one type of GPU that are neither draining nor unfit, of those whose agent is ready, and
            that has imported modules.
        """
        with self._lock:
            nodes = self._nodes()
            dead = dead_nodes(self._agents.values())
            self._fitness.advance()
            unfit = self._fitness.excluded()
            slots_of = slots_by_node(nodes, gpus, self._draining().keys() | unfit)
            self._usable = slots_of_one_kind(slots_of, nodes, self.occupied())
            kept = unfit if not self._has_placed else set()  # the group of an earlier driver may still train there
            for agent in list(self._agents.values()):
                if agent.node in dead:
                    self._forget_dead(agent)
                elif agent.placements or agent.node in kept:
                    continue
                elif (agent.gpus, agent.slots) != (gpus, slots_of.get(agent.node)):
                    self._kill(agent)
            for node, slots in slots_of.items():
                if node not in self._agents and time.monotonic() >= self._not_before.get(node, 0.0):
                    self._agents[node] = self._start(node, slots, gpus)
            ready = [agent for agent in self._agents.values() if agent.node in self._usable and agent.is_ready()]
            imported = sum(agent.slots for agent in ready if agent.has_imported())
            return Slots(sum(self._usable.values()), sum(agent.slots for agent in ready), imported)

    def draining(self) -> Mapping[str, float]:
        """Draining nodes, each with its deadline in seconds since the epoch (0: no deadline)."""
        return self._draining()

    def unfit_nodes(self) -> list[dict[str, Any]]:
        """The nodes that are left out: `node`, `boot`, `reason`, `since` (unix time), and whether ranks run (`inUse`).

        Takes no lock: the thread that publishes the status must not wait for agents.
        """
        unfit = self._fitness.unfit_nodes()
        if not unfit:  # as nearly always, and a status has no time for a thousand names
            return []
        in_use = {self._fitness.name_of(agent.node) for agent in list(self._agents.values()) if agent.placements}
        return [{**each, "inUse": each["node"] in in_use} for each in unfit]

    def leave_out(self, rank: int, reason: str, at_least: int) -> bool:
        """Leave out the node of a rank from now on, if usable nodes have slots for `at_least` workers without it."""
        with self._lock:
            ready = [a for a in self._agents.values() if a.node in self._usable and a.is_ready() and not a.is_dead()]
            host = next((agent.node for agent in ready if rank in {place.rank for place in agent.placements}), None)
            if host is None or sum(a.slots for a in ready if not self._fitness.is_same_node(a.node, host)) < at_least:
                return False
            self._fitness.leave_out(host, reason)
            return True

    def occupied(self) -> set[str]:
        """Nodes that run ranks of the current group."""
        with self._lock:
            return {agent.node for agent in self._agents.values() if agent.placements}

    def worker_memory_bytes(self, workers: int, gpus: bool) -> int:
        """Memory in bytes of one of `workers` ranks: of its GPU, or its share of a node. Asks an agent that is ready.

        Raises:
            InfrastructureError: no agent replies, or the GPUs cannot be used.
        """
        with self._lock:
            ready = [agent for agent in self._agents.values() if agent.node in self._usable and agent.is_ready()]
        problem: object = "no node agent replied; the nodes may have been lost"
        for agent in ready:
            try:
                if gpus:
                    return int(ray.get(agent.handle.call.remote("gpu_memory_bytes"), timeout=_IMPORT_SECONDS))
                return agent.info().memory_bytes // min(agent.slots, workers)
            except RayTaskError as error:  # the agent's own; any other only says that the node was lost
                problem = error.cause
            except RayError:
                continue
        raise InfrastructureError(f"the memory of a worker is unknown: {problem}")

    def run_group(self, task: WorkerTask, world_size: int) -> GroupResult:
        """Run one generation on `world_size` ranks; returns when all of them have exited."""
        none = f"there are no longer slots for {world_size} workers"
        return self._result_of(task, lambda: self._start_ranks(task, world_size), none)

    def find_group(self, generation: int) -> FoundGroup | None:
        """The group of a generation that an earlier driver has started; None if ready agents have no rank of it."""
        return found_group(list(self._groups_of(generation).values()))

    def adopt_group(self, group: FoundGroup) -> GroupResult:
        """Wait until all ranks of a complete group have exited that an earlier driver has started."""
        return self._result_of(group.task, lambda: self._find_ranks(group), "its nodes are gone")

    def kill_ranks(self) -> None:
        """Kill all ranks on agents that have started: those of earlier drivers."""
        with self._lock:
            ready = [agent for agent in self._agents.values() if agent.has_started()]
        with suppress(RayError):
            for ended in [agent.handle.call.remote("kill_ranks") for agent in ready]:
                ray.wait([ended], timeout=REPLY_SECONDS)

    def _result_of(self, task: WorkerTask, start: Callable[[], dict[Any, RayAgent]], otherwise: str) -> GroupResult:
        """The result of a group.

        Args:
            task: of its generation.
            start: starts or finds its ranks; returns a call for each of their agents.
            otherwise: the error if it returns none.
        """
        results: list[RankResult] = []
        lost: dict[int, str] = {}
        ray_error = otherwise
        try:
            if calls := start():
                ray_error = self._wait_for_ranks(task, calls, results, lost)
        except RayError as error:
            ray_error = str(error)
        finally:
            with self._lock:
                for agent in self._agents.values():
                    agent.placements = []
        if self._relay is not None:
            self._relay.pull()
        result = classify_exit(task.logs, results, lost, ray_error)
        self._reuse_processes = _leaves_processes(result)
        return result

    def _groups_of(self, generation: int) -> dict[str, NodeGroup]:
        """The ranks of a generation on each node whose agent has started."""
        with self._lock:
            ready = [agent for agent in self._agents.values() if agent.has_started() and not agent.is_dead()]
        found = {}
        for agent, answer in [(agent, agent.handle.call.remote("group")) for agent in ready]:  # all at the same time
            with suppress(RayError):
                group: NodeGroup | None = ray.get(answer, timeout=REPLY_SECONDS)
                if group is not None and group.task.generation == generation:
                    found[agent.node] = group
        return found

    def _find_ranks(self, group: FoundGroup) -> dict[Any, RayAgent]:
        """Wait for the ranks of a group at the agents that have them; at none if an agent was lost meanwhile."""
        generation = group.task.generation
        parts, calls = self._groups_of(generation), {}
        again = found_group(list(parts.values()))
        if again is None or not again.is_complete:
            return {}
        with self._lock:
            self._has_placed = True
            for node, part in parts.items():
                if (agent := self._agents.get(node)) is not None:
                    agent.placements = list(part.placements)
                    calls[agent.handle.call.remote("wait_for_ranks", generation)] = agent
        return calls if len(calls) == len(parts) else {}

    def _place_ranks(self, world_size: int) -> list[RayAgent]:
        """Assign ranks to as few agents as possible; returns these by rank, none if there are not enough slots."""
        with self._lock:
            usable = [agent for agent in self._agents.values() if agent.node in self._usable]
            ready = [agent for agent in usable if agent.is_ready() and not agent.is_dead()]
            ready.sort(key=lambda agent: (-agent.slots, agent.node))
            shares: list[tuple[RayAgent, range]] = []
            taken = 0
            for agent in ready:
                share = range(taken, min(taken + agent.slots, world_size))
                if share:
                    shares.append((agent, share))
                    taken = share.stop
            if taken < world_size:
                return []
            first = shares[0][0]
            address = first.info().address
            port = ray.get(first.handle.call.remote("free_port"), timeout=REPLY_SECONDS)
            for node, (agent, share) in enumerate(shares):
                group = world_size, address, port, node, len(shares)
                agent.placements = [RankPlacement(rank, rank - share.start, len(share), *group) for rank in share]
            return [agent for agent, _ in shares]

    def _start_ranks(self, task: WorkerTask, world_size: int) -> dict[Any, RayAgent]:
        """Place the ranks and start them; none if there are not enough slots."""
        self._has_placed = True
        hosts = self._place_ranks(world_size)  # also one that has died since: its ranks are lost
        if not hosts:
            return {}
        with self._lock:
            idle = [agent for agent in self._agents.values() if not agent.placements and agent.is_ready()]
        addresses = NodeAddresses(
            tuple(agent.info().peer for agent in hosts), tuple(agent.info().peer for agent in idle)
        )
        shared = ray.put(addresses)  # once: a thousand nodes would get a thousand addresses each
        options = {"keep": _keeps_processes(), "reuse": _keeps_processes() and self._reuse_processes}
        return {
            agent.handle.call.remote("run_ranks", task, agent.placements, shared, **options): agent for agent in hosts
        }

    def _wait_for_ranks(
        self, task: WorkerTask, running: dict[Any, RayAgent], results: list[RankResult], lost: dict[int, str]
    ) -> str:
        """Wait until all ranks have exited; once one fails, the others are aborted.

        Args:
            task: of the generation.
            running: for each agent of the group, the call that returns its results.
            results: gets the results of ranks.
            lost: gets the ranks whose agent died or does not reply, with the class of Ray's error.

        Returns:
            Ray's last error about a lost agent; empty if none was lost.
        """
        ray_error, timeout = "", None
        while running:
            done, _ = ray.wait(list(running), num_returns=1, timeout=timeout)
            if done:  # with a thousand agents, others have ended as well by now
                done, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
            for call in done or list(running):  # an agent that does not reply in time counts as lost
                agent = running.pop(call)
                try:
                    finished: list[RankResult] = ray.get(call, timeout=0)
                    failed = any(result.status for result in finished)
                    was_lost = any(result.is_lost for result in finished)
                    results += finished
                    self._fitness.check_again(agent.node, finished)
                except RayError as error:
                    ray_error, failed, was_lost = str(error), True, True
                    lost |= {place.rank: type(error).__name__ for place in agent.placements}
                    self._kill(agent)
                if failed and timeout is None:
                    timeout = (GRACE_SECONDS_OF_KEPT if _keeps_processes() else GRACE_SECONDS) + REPLY_SECONDS
                    for other in running.values():
                        other.handle.call.remote("abort", task.generation, lost=was_lost)
        return ray_error

    def _start(self, node: str, slots: int, gpus: bool) -> RayAgent:
        """Start an agent, and the check of its node."""
        handle = self._start_actor(node, slots, gpus)
        info, imported = handle.call.remote("info"), handle.call.remote("import_modules")
        death = handle.block_forever.remote()
        self._fitness.begin(node, handle.call.remote, info, gpus=gpus)
        return RayAgent(node, slots, gpus, handle, self._fitness, info, imported_ref=imported, death_ref=death)

    def _start_actor(self, node: str, slots: int, gpus: bool) -> Any:
        """Start an actor that occupies all slots of a node. Ray would drain a node without work at once."""
        actor: Any = ray.remote(NodeProxy)
        functions = calls_function(JobDirectory(Path(self._directory)))
        return actor.options(
            num_cpus=0 if gpus else slots,
            num_gpus=slots if gpus else 0,
            max_concurrency=_CALLS_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(self._directory, gpus, self._driver, self._secret, self._bucket, functions)

    def _relayed(self) -> list[RelayedNode]:
        """The nodes whose files the driver reads."""
        with self._lock:
            return [RelayedNode(agent.handle) for agent in self._agents.values() if agent.has_started()]

    def _kill(self, agent: RayAgent) -> None:
        """End an agent and forget it."""
        with suppress(RayError):
            ray.wait([agent.handle.exit_agent.remote()], timeout=_EXIT_SECONDS)
            ray.kill(agent.handle)
        with self._lock:
            self._agents.pop(agent.node, None)
            self._fitness.forget(agent.node)

    def _forget_dead(self, agent: RayAgent) -> None:
        """Forget an agent that has died, and log why."""
        try:
            ray.get(agent.death_ref)
        except RayError as error:
            logger.warning("the agent on node %s died: %s", agent.node, str(error).strip().splitlines()[0])
        self._agents.pop(agent.node, None)
        self._fitness.forget(agent.node)
        self._not_before[agent.node] = time.monotonic() + _RESTART_SECONDS


def _leaves_processes(result: GroupResult) -> bool:
    """Whether the next group may use processes of the group with this result."""
    return isinstance(result, Yielded) or (isinstance(result, Failed) and result.cause is FailureCause.WORKER_LOST)


def _keeps_processes() -> bool:
    return os.environ.get(_KEEP_PROCESSES) == "1"
