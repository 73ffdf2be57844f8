"""How many workers a worker group starts with."""

from __future__ import annotations


def choose_world_size(
    slots: int,
    minimum: int,
    desired: int,
    waited_seconds: float,
    patience_seconds: float,
    enough: int | None = None,
) -> int | None:
    """Number of workers to start with; None to keep waiting.

    As many as there are slots, up to `desired`: as soon as there are `enough` (None: `desired`), and after
    `patience_seconds` if there are at least `minimum`.
    """
    if slots >= (desired if enough is None else max(minimum, min(enough, desired))):
        return min(slots, desired)
    if slots >= minimum and waited_seconds >= patience_seconds:
        return slots
    return None
