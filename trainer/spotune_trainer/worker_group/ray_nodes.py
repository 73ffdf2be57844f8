"""The nodes of a Ray cluster, as a driver sees them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ray._private.state import state as ray_state

from spotune.job.pools import GPU_TYPE_RESOURCE


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
