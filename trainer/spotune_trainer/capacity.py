"""How many workers there could be now, and how many to start with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def live_slots(nodes: Iterable[Mapping[str, Any]], resource: str) -> int:
    """Workers that the living nodes of a Ray cluster have room for, one for each whole unit of `resource`.

    Args:
        nodes: what `ray.nodes()` returns.
        resource: `GPU`, or `CPU` for jobs without GPUs.
    """
    return sum(int(node["Resources"].get(resource, 0)) for node in nodes if node["Alive"])


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
