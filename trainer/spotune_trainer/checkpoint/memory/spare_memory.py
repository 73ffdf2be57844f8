"""Whether a node has memory to spare for one more snapshot."""

from __future__ import annotations

from collections.abc import Callable

from spotune.plan.devices import machine_memory_bytes

SPARE_FRACTION = 0.1
"""Share of the node's memory that a further snapshot must leave free: later steps may need more than those so far."""


def shortage(needed_bytes: int, free_bytes: Callable[[], int]) -> str | None:
    """Why a node has no such memory to spare, as the end of a sentence; None if it has.

    Args:
        needed_bytes: of the memory to allocate.
        free_bytes: returns the free memory of the node.
    """
    if needed_bytes <= 0:
        return None
    free = free_bytes()
    if free - needed_bytes >= SPARE_FRACTION * machine_memory_bytes():
        return None
    return f"needs {needed_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
