"""What goes into a simulation and comes out of it: what things take, what a user chooses, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from spotune.goodput import Part, goodput
from spotune.simulate.supply import Capacity, HeadCapacity

NEVER: Final = math.inf
"""A time that does not come, and a duration that does not end."""


@dataclass(frozen=True)
class Times:
    """What things take, in seconds.

    Attributes:
        step: A step, by number of workers; at another number in inverse proportion to the nearest one.
        data_wait: That a step waits for its samples, on top.
        start_up: From the start of a worker group to its first step, without restoring.
        restore: Reading a checkpoint.
        stall: That training waits for a commit.
        commit: From the beginning of a commit until it is durable.
        detection: From the loss of a worker to the end of its group.
        attempt: From the start of a driver until it can start workers.
        head_loss: From the loss of a head until its successor starts a driver, given a node for it.
        patience: That a driver waits for all workers before it starts with fewer.
        steady: That nodes must be there before a worker group leaves for them.
        backoff: First pause of the retry policy.
        longest_backoff: Longest pause of the retry policy.
    """

    step: Mapping[int, float]
    data_wait: float = 0.0
    start_up: float = 60.0
    restore: float = 15.0
    stall: float = 0.5
    commit: float = 30.0
    detection: float = 2.0
    attempt: float = 15.0
    head_loss: float = 45.0
    patience: float = 30.0
    steady: float = 10.0
    backoff: float = 5.0
    longest_backoff: float = 300.0

    def step_seconds(self, workers: int) -> float:
        """Seconds of a step at a number of workers."""
        nearest = min(self.step, key=lambda count: (abs(math.log(count / workers)), count))
        return self.step[nearest] * nearest / workers


@dataclass(frozen=True)
class Choice:
    """What a user can choose.

    Attributes:
        workers: Nodes wanted for workers.
        fewest: Nodes that training goes on with.
        every: `checkpoint.every`: auto, seconds, or a number of steps.
        head: Capacity of the head.
        capacity: Capacity of the workers.
        on_demand_after: Seconds that a worker waits for a spot node before it gets one on demand.
        resize_cooldown: Shortest time between two growths of the worker group, in seconds; infinite: it never grows.
        notice: Seconds between a spot notice and the loss of the node; 0: there is none.
    """

    workers: int
    fewest: int = 1
    every: str | float | int = "auto"
    head: HeadCapacity = "on-demand"
    capacity: Capacity = "spot"
    on_demand_after: float = 600.0
    resize_cooldown: float = 600.0
    notice: float = 0.0


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        spent: Seconds by part.
        steps: Steps done that were not rolled back.
        steps_lost: Steps that were rolled back.
        restarts: Worker groups that were started after the first.
        spot_seconds: Seconds of worker nodes, summed, on spot capacity.
        on_demand_seconds: The same on demand.
        head_seconds: Seconds of the head's node.
        finished: Whether all steps were done.
    """

    spent: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(Part, 0.0))
    steps: int = 0
    steps_lost: int = 0
    restarts: int = -1
    spot_seconds: float = 0.0
    on_demand_seconds: float = 0.0
    head_seconds: float = 0.0
    finished: bool = False

    @property
    def seconds(self) -> float:
        """Wall clock."""
        return math.fsum(self.spent.values())

    @property
    def goodput(self) -> float:
        """Productive time over wall clock."""
        return goodput(self.spent) or 0.0
