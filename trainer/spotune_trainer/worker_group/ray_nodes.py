"""The nodes of a Ray cluster and the agents on them, as a driver sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray._private.state import state as ray_state

from spotune.job.pools import GPU_TYPE_RESOURCE
from spotune_trainer.training.task import RankPlacement
from spotune_trainer.worker_group.fitness.node_fitness import NodeFitness
from spotune_trainer.worker_group.node_state import NodeInfo
from spotune_trainer.worker_group.relay import Notices

REPLY_SECONDS: Final = 30.0
_RELAY_SECONDS: Final = 5.0


@dataclass
class RayAgent:
    """One agent, and the references of the three calls that show its state (see `AgentPool`).

    Attributes:
        node: Ray's id of its node.
        slots: number of ranks that it can run.
        gpus: whether they train on GPUs.
        handle: of the actor.
        fitness: knows whether the node may be used.
        info_ref: result of `NodeAgent.info()`; resolves once the actor has started.
        imported_ref: result of `NodeAgent.import_modules()`; resolves once a rank starts there without imports.
        death_ref: result of `NodeProxy.block_forever()`; resolves, with an error, once actor or agent is dead.
        placements: of the ranks of the running group; empty if it runs none.
    """

    node: str
    slots: int
    gpus: bool
    handle: Any
    fitness: NodeFitness
    info_ref: Any
    imported_ref: Any
    death_ref: Any
    placements: list[RankPlacement] = field(default_factory=list)
    _resolved: set[str] = field(default_factory=set)

    def has_started(self) -> bool:
        """Whether the actor has started."""
        return self._has_resolved("info", self.info_ref)

    def is_ready(self) -> bool:
        """Whether the actor has started, and the node has been checked and is fit."""
        return self.has_started() and self.fitness.is_ready(self.node)

    def has_imported(self) -> bool:
        """Whether a rank starts there without imports."""
        return self._has_resolved("imported", self.imported_ref)

    def is_dead(self) -> bool:
        """Whether actor or agent is dead."""
        return bool(ray.wait([self.death_ref], timeout=0)[0])

    def _has_resolved(self, name: str, reference: Any) -> bool:
        """Whether a call has a result, which it keeps: Ray is not asked again."""
        if name not in self._resolved and ray.wait([reference], timeout=0)[0]:
            self._resolved.add(name)
        return name in self._resolved

    def info(self) -> NodeInfo:
        """Address and memory of the node."""
        info: NodeInfo = ray.get(self.info_ref, timeout=REPLY_SECONDS)
        return info


def dead_nodes(agents: Iterable[RayAgent]) -> set[str]:
    """The nodes of agents that are dead, by one call of Ray for all of them."""
    node_of = {agent.death_ref: agent.node for agent in agents}
    if not node_of:
        return set()
    dead, _ = ray.wait(list(node_of), num_returns=len(node_of), timeout=0)
    return {node_of[reference] for reference in dead}


@dataclass(frozen=True)
class RelayedNode:
    """A node for `Relay`, reached by its actor."""

    handle: Any

    def exchange(self, generation: int, notices: Notices, known: Mapping[str, int]) -> Callable[[], Any]:
        """As `relay.Node`."""
        answer = self.handle.exchange.remote(generation, notices, known)
        return lambda: ray.get(answer, timeout=_RELAY_SECONDS)


def slots_by_node(nodes: Iterable[Mapping[str, Any]], gpus: bool, draining: Collection[str] = ()) -> dict[str, int]:
    """Worker slots of each living node of a Ray cluster: one for each whole GPU or, without GPUs, each CPU.

    Args:
        nodes: what `ray.nodes()` returns.
        gpus: whether workers train on GPUs.
        draining: nodes that are left out.
    """
    resource = "GPU" if gpus else "CPU"
    slots = {node["NodeID"]: int(node["Resources"].get(resource, 0)) for node in nodes if node["Alive"]}
    return {node: number for node, number in slots.items() if number > 0 and node not in draining}


def slots_of_one_kind(
    slots: Mapping[str, int], nodes: Iterable[Mapping[str, Any]], occupied: Collection[str]
) -> dict[str, int]:
    """The slots of nodes with one type of GPU: the type with the most slots, since types never train together.

    Args:
        slots: worker slots of each node that may be used.
        nodes: what `ray.nodes()` returns. A pool with a `gpuType` gives its nodes a resource that names it.
        occupied: nodes that run ranks; if two types have as many slots, that of these nodes is used.
    """
    kinds = {node["NodeID"]: _gpu_type(node["Resources"]) for node in nodes if node["NodeID"] in slots}
    totals: dict[str, tuple[int, int]] = {}
    for node, kind in kinds.items():
        total, used = totals.get(kind, (0, 0))
        totals[kind] = total + slots[node], used + (node in occupied)
    best = max(sorted(totals), key=lambda kind: totals[kind], default="")
    return {node: number for node, number in slots.items() if kinds[node] == best}


def _gpu_type(resources: Mapping[str, float]) -> str:
    """Name of the GPU type of a node; empty if its pool has none."""
    found = (name.removeprefix(GPU_TYPE_RESOURCE) for name in resources if name.startswith(GPU_TYPE_RESOURCE))
    return next(found, "")


def draining_nodes() -> dict[str, float]:
    """Draining nodes of the Ray cluster, each with its deadline in seconds since the epoch (0: no deadline).

    Ray Train's preemption watcher uses the same call. Ray has no public API for it.
    """
    return {node: deadline / 1000 for node, deadline in ray_state.get_draining_nodes().items()}
