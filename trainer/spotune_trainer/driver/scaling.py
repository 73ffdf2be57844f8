"""How many workers there could be now, and how many to start with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def slots_by_node(nodes: Iterable[Mapping[str, Any]], gpus: bool) -> dict[str, int]:
    """Workers that each living node of a Ray cluster has room for, one for each whole GPU or, without GPUs, CPU.

    Args:
        nodes: what `ray.nodes()` returns.
        gpus: whether workers train on GPUs.
    """
    resource = "GPU" if gpus else "CPU"
    slots = {node["NodeID"]: int(node["Resources"].get(resource, 0)) for node in nodes if node["Alive"]}
    return {node: number for node, number in slots.items() if number > 0}


def choose_world_size(
    slots: int, fewest: int, wanted: int, waited_seconds: float, patience_seconds: float
) -> int | None:
    """Workers to start with, or None to wait on.

    All that are wanted as soon as there is room for them; after `patience_seconds` as many as there are, if they are
    not fewer than `fewest`.
    """
    if slots >= wanted:
        return wanted
    if slots >= fewest and waited_seconds >= patience_seconds:
        return slots
    return None
