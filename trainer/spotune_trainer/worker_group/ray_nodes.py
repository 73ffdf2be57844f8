"""The nodes of a Ray cluster, as a driver sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ray._private.state import state as ray_state


def slots_by_node(nodes: Iterable[Mapping[str, Any]], gpus: bool) -> dict[str, int]:
    """Worker slots of each living node of a Ray cluster: one for each whole GPU or, without GPUs, each CPU.

    Args:
        nodes: what `ray.nodes()` returns.
        gpus: whether workers train on GPUs.
    """
    resource = "GPU" if gpus else "CPU"
    slots = {node["NodeID"]: int(node["Resources"].get(resource, 0)) for node in nodes if node["Alive"]}
    return {node: number for node, number in slots.items() if number > 0}


def draining_nodes() -> dict[str, float]:
    """Draining nodes of the Ray cluster, each with its deadline in seconds since the epoch (0: no deadline).

    Ray Train's preemption watcher uses the same call. Ray has no public API for it.
    """
    return {node: deadline / 1000 for node, deadline in ray_state.get_draining_nodes().items()}
