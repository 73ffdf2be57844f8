"""How many workers a worker group starts with."""

from __future__ import annotations


def choose_world_size(
    slots: int, minimum: int, desired: int, waited_seconds: float, patience_seconds: float
) -> int | None:
    """Number of workers to start with; None to keep waiting.

    `desired` as soon as there are as many slots; after `patience_seconds` as many as there are slots, but at least
    `minimum`.
    """
    if slots >= desired:
        return desired
    if slots >= minimum and waited_seconds >= patience_seconds:
        return slots
    return None
