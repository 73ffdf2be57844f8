"""Computes which nodes a job holds over time: spot nodes of the trace, and on-demand replacements.

It follows the operator's rules. A worker that has waited `workers.onDemandAfter` for a spot node gets an on-demand node
until a spot node is available. A spot head gets a node before the workers do.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from spotune.simulate.trace import Trace

Capacity = Literal["spot", "on-demand", "spot-then-on-demand"]
HeadCapacity = Literal["spot", "on-demand"]


@dataclass(frozen=True)
class NodeSupply:
    """The nodes that a job holds from a point in time on.

    Attributes:
        seconds: The point in time.
        spot: Workers on spot nodes.
        on_demand: Workers on on-demand nodes.
        lost: Number of workers lost at this point.
        head: Whether there is a node for the head.
        head_lost: Whether the head was lost at this point.
        joining: Workers on nodes that have joined but cannot train yet.
        going: Workers on nodes that were announced to be lost.
    """

    seconds: float
    spot: int
    on_demand: int
    lost: int = 0
    head: bool = True
    head_lost: bool = False
    joining: int = 0
    going: int = 0

    @property
    def workers(self) -> int:
        """Total number of workers."""
        return self.spot + self.on_demand

    @property
    def slots(self) -> int:
        """Workers that the next worker group can have."""
        return self.workers - self.joining - self.going


def supply(
    trace: Trace, workers: int, capacity: Capacity, head: HeadCapacity, on_demand_after: float, random: Random
) -> Iterator[NodeSupply]:
    """Yield the changes of a job's nodes over an endlessly repeated trace, in order of time, starting at 0.

    Args:
        trace: Available spot nodes over time.
        workers: Desired number of worker nodes.
        capacity: Capacity of the workers.
        head: Capacity of the head.
        on_demand_after: Seconds that a worker waits for a spot node before it gets an on-demand node, if allowed.
        random: Decides which nodes are lost: the head's or a worker's.
    """
    if capacity == "on-demand" and head == "on-demand":
        yield NodeSupply(0.0, 0, workers)
        return
    holds = _NodeAllocator(workers, capacity, head == "spot", on_demand_after, random)
    for seconds, nodes in trace.repeated():
        yield from holds.on_demand_replacements(seconds)
        yield holds.change(seconds, nodes)


class _NodeAllocator:
    """The nodes that a job currently holds, and since when its missing workers wait."""

    def __init__(self, workers: int, capacity: Capacity, spot_head: bool, after: float, random: Random) -> None:
        self._desired = workers
        self._capacity = capacity
        self._spot_head = spot_head
        self._after = after
        self._random = random
        self._spot = 0
        self._on_demand = workers if capacity == "on-demand" else 0
        self._head = not spot_head
        self._waiting: list[float] = [] if capacity == "on-demand" else [0.0] * workers

    def on_demand_replacements(self, seconds: float) -> Iterator[NodeSupply]:
        """Yield the replacements of workers by on-demand nodes that are due before a point in time."""
        if self._capacity != "spot-then-on-demand":
            return
        while self._on_demand < len(self._waiting):
            due = heapq.nsmallest(self._on_demand + 1, self._waiting)[-1] + self._after
            if due >= seconds:
                return
            self._on_demand += 1
            yield NodeSupply(due, self._spot, self._on_demand, head=self._head)

    def change(self, seconds: float, nodes: int) -> NodeSupply:
        """Apply a new number of available spot nodes."""
        held = self._spot + (self._spot_head and self._head)
        gone = max(0, held - nodes)
        head_lost = self._spot_head and self._head and self._random.random() * held < gone
        if self._spot_head:
            self._head = nodes > 0
            nodes = max(0, nodes - 1)
        spot = min(nodes, self._desired) if self._capacity != "on-demand" else 0
        lost = max(0, self._spot - spot)
        self._waiting += [seconds] * lost
        self._waiting = sorted(self._waiting)[max(0, spot - self._spot) :]
        self._spot = spot
        if self._capacity == "spot-then-on-demand":
            overdue = sum(since + self._after <= seconds for since in self._waiting)
            lost += max(0, self._on_demand - overdue)
            self._on_demand = min(self._on_demand, overdue)
        return NodeSupply(seconds, self._spot, self._on_demand, lost, self._head, head_lost)
