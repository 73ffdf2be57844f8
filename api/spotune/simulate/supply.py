"""Which nodes a job holds at which time: those of the trace that it wants, and on-demand ones in place of missing ones.

Follows the operator: a worker that has waited for a spot node for `workers.onDemandAfter` gets one on demand in its
place, for as long as there is no spot node. A head on a spot node comes before the workers.
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
class Moment:
    """What a job holds from a time on.

    Attributes:
        seconds: When.
        spot: Workers on spot nodes.
        on_demand: Workers on on-demand nodes.
        lost: Workers that it held before and that are gone.
        head: Whether there is a node for the head.
        head_lost: Whether the head was on a node that is gone.
    """

    seconds: float
    spot: int
    on_demand: int
    lost: int = 0
    head: bool = True
    head_lost: bool = False

    @property
    def workers(self) -> int:
        """Workers that there are."""
        return self.spot + self.on_demand


def supply(
    trace: Trace, workers: int, capacity: Capacity, head: HeadCapacity, on_demand_after: float, random: Random
) -> Iterator[Moment]:
    """What a job holds over a trace that is repeated for ever; moments in order of time, the first at 0.

    Args:
        trace: Spot nodes that there are.
        workers: Nodes that the job wants for its workers.
        capacity: Of the workers.
        head: Capacity of the head.
        on_demand_after: Seconds that a worker waits for a spot node before it gets one on demand, where it may.
        random: Chooses which of the nodes are lost: the head's, or those of workers.
    """
    if capacity == "on-demand" and head == "on-demand":
        yield Moment(0.0, 0, workers)
        return
    holds = _Holdings(workers, capacity, head == "spot", on_demand_after, random)
    for seconds, nodes in trace.repeated():
        yield from holds.replaced_before(seconds)
        yield holds.change(seconds, nodes)


class _Holdings:
    """What a job holds now, and since when it waits for the rest."""

    def __init__(self, workers: int, capacity: Capacity, spot_head: bool, after: float, random: Random) -> None:
        self._wanted = workers
        self._capacity = capacity
        self._spot_head = spot_head
        self._after = after
        self._random = random
        self._spot = 0
        self._on_demand = workers if capacity == "on-demand" else 0
        self._head = not spot_head
        self._waiting: list[float] = [] if capacity == "on-demand" else [0.0] * workers

    def replaced_before(self, seconds: float) -> Iterator[Moment]:
        """Workers that get a node on demand before a time, since they have waited for so long."""
        if self._capacity != "spot-then-on-demand":
            return
        while self._on_demand < len(self._waiting):
            due = heapq.nsmallest(self._on_demand + 1, self._waiting)[-1] + self._after
            if due >= seconds:
                return
            self._on_demand += 1
            yield Moment(due, self._spot, self._on_demand, head=self._head)

    def change(self, seconds: float, nodes: int) -> Moment:
        """Another number of spot nodes."""
        held = self._spot + (self._spot_head and self._head)
        gone = max(0, held - nodes)
        head_lost = self._spot_head and self._head and self._random.random() * held < gone
        if self._spot_head:
            self._head = nodes > 0
            nodes = max(0, nodes - 1)
        spot = min(nodes, self._wanted) if self._capacity != "on-demand" else 0
        lost = max(0, self._spot - spot)
        self._waiting += [seconds] * lost
        self._waiting = sorted(self._waiting)[max(0, spot - self._spot) :]
        self._spot = spot
        if self._capacity == "spot-then-on-demand":
            overdue = sum(since + self._after <= seconds for since in self._waiting)
            lost += max(0, self._on_demand - overdue)
            self._on_demand = min(self._on_demand, overdue)
        return Moment(seconds, self._spot, self._on_demand, lost, self._head, head_lost)
