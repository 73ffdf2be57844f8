"""How many workers a worker group starts with, and what is said while it waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spotune_trainer.worker_group.fitness.node_fitness import left_out


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


def waiting_message(ready: int, minimum: int, desired: int, reason: str, unfit: Sequence[Mapping[str, Any]]) -> str:
    """What the driver waits for, for people.

    Args:
        ready: workers that could start.
        minimum: workers that the group needs.
        desired: workers that the job asks for.
        reason: why it needs the minimum.
        unfit: nodes that are left out.
    """
    message = f"{ready} of {desired} workers are ready"
    if ready < minimum:
        others = "; waiting for other nodes" if unfit else ""
        message = f"{message}, {minimum} {'is' if minimum == 1 else 'are'} needed{reason}{others}"
    elif ready < desired:
        message = f"{message}, {minimum} would be enough: waiting a little for the others"
    return "; ".join([message, *([left_out(unfit)] if unfit else [])])
