"""What a choice between pools is made from, and what it results in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_PAUSE_SECONDS: Final = 3600.0
"""A pool that has refused is left alone no longer than this, or than its patience if that is longer."""
FORGET_AFTER_PAUSES: Final = 4
"""A refusal is forgotten after so many of its pauses, so that the next one does not count as a repetition."""


@dataclass(frozen=True)
class Pool:
    """A pool of nodes.

    Attributes:
        name: Its name.
        most: Maximum number of workers in it.
        after: Its patience: seconds that a worker waits for a node.
        kind: Workers of different kinds never train together.
        on_demand: Whether its nodes are not taken back.
    """

    name: str
    most: int
    after: float
    kind: str = ""
    on_demand: bool = False


@dataclass(frozen=True)
class Worker:
    """A worker pod.

    Attributes:
        name: Its name.
        pool: Name of its pool.
        created: Unix time.
        has_node: Whether it has a node; otherwise it waits for one.
        ready: Whether it can train.
        is_going: Whether it is being deleted.
    """

    name: str
    pool: str
    created: float
    has_node: bool = False
    ready: bool = False
    is_going: bool = False


@dataclass(frozen=True)
class PoolMemory:
    """What is remembered of a pool.

    Attributes:
        refusals: How often in a row no node came in time.
        refused_at: Unix time of the last refusal; None without one.
        retry_at: Unix time before which the pool is left alone.
        leaving: Names of workers that are being removed.
    """

    refusals: int = 0
    refused_at: float | None = None
    retry_at: float | None = None
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wish:
    """What the job asks for.

    Attributes:
        count: Desired number of workers.
        minimum: Number with which it can train.
        cooldown: Minimum seconds between two moves.
    """

    count: int
    minimum: int = 1
    cooldown: float = 600.0


@dataclass(frozen=True)
class Choice:
    """The desired workers of each pool.

    Attributes:
        replicas: Number of workers by pool, without those that leave.
        memory: What to remember, by pool; with the workers to remove.
        moved_at: Unix time of the last move; None before the first.
        next_change: Unix time at which the choice may change without an event; None: it does not.
    """

    replicas: Mapping[str, int]
    memory: Mapping[str, PoolMemory]
    moved_at: float | None
    next_change: float | None


def pause_seconds(pool: Pool, refusals: int) -> float:
    """How long a pool is left alone after so many refusals in a row: its patience, doubled each time."""
    return float(min(pool.after * 2.0 ** min(refusals - 1, 32), max(MAX_PAUSE_SECONDS, pool.after)))


def without_old_refusals(pool: Pool, memory: PoolMemory, now: float) -> PoolMemory:
    """The memory of a pool at this Unix time: refusals that are long ago are forgotten."""
    if memory.refused_at is None:
        return memory
    if now - memory.refused_at < FORGET_AFTER_PAUSES * pause_seconds(pool, max(1, memory.refusals)):
        return memory
    return PoolMemory(leaving=memory.leaving)
