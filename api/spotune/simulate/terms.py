"""Inputs and outputs of a simulation: durations, the user's choices, and the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from spotune.goodput import Part, goodput
from spotune.resize.times import scaled_step_seconds
from spotune.simulate.supply import Capacity, HeadCapacity

NEVER: Final = math.inf
"""A point in time that is never reached, or an infinite duration."""


@dataclass(frozen=True)
class Timings:
    """Durations of all activities, in seconds.

    Attributes:
        step: One step, by number of workers. Other numbers scale inversely from the nearest one.
        data_wait: Additional wait for samples per step.
        start_up: From the start of a worker group to its first step, without restoring.
        first_start_up: The same for the first group of a driver, whose nodes still import modules; None: as long as for
            any other group.
        restore: Loading a checkpoint.
        stall: Time for which a commit blocks training.
        commit: From the start of a commit until it is durable.
        detection: From the loss of a worker to the end of its group.
        attempt: From the start of a driver until it can start workers.
        join: From the arrival of a node until it can train. For nodes that are there when a driver starts it is a part
            of `attempt` and `first_start_up`.
        head_loss: From the loss of a head until a new head starts a driver, without the wait for its node.
        patience: Time that a driver waits for all workers before it starts with fewer.
        steady: Time that additional nodes must be available before a worker group is resized.
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
    first_start_up: float | None = None
    join: float = 0.0

    def step_seconds(self, workers: int) -> float:
        """Seconds per step with the given number of workers."""
        return scaled_step_seconds(self.step, workers)


@dataclass(frozen=True)
class Scenario:
    """The user's choices that a simulation compares.

    Attributes:
        workers: Desired number of worker nodes.
        min_workers: Minimum number of worker nodes.
        checkpoint_every: `checkpoint.every`: auto, seconds, or a number of steps.
        head: Capacity of the head.
        capacity: Capacity of the workers.
        on_demand_after: Seconds that a worker waits for a spot node before it gets an on-demand node.
        resize_cooldown: Minimum seconds between two resizes that add workers; infinite: no resizes.
        notice: Seconds between a preemption notice and the loss of the node; 0: no notice.
    """

    workers: int
    min_workers: int = 1
    checkpoint_every: str | float | int = "auto"
    head: HeadCapacity = "on-demand"
    capacity: Capacity = "spot"
    on_demand_after: float = 600.0
    resize_cooldown: float = 600.0
    notice: float = 0.0


@dataclass
class SimulationResult:
    """The result of one simulation.

    Attributes:
        spent: Seconds by part.
        steps: Completed steps that were not rolled back.
        steps_lost: Steps that were rolled back.
        restarts: Number of worker groups after the first.
        spot_seconds: Node seconds of workers on spot nodes.
        on_demand_seconds: Node seconds of workers on on-demand nodes.
        head_seconds: Seconds of the head's node.
        finished: Whether all steps were completed.
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
        """Wall-clock seconds."""
        return math.fsum(self.spent.values())

    @property
    def goodput(self) -> float:
        """Productive time over wall clock."""
        return goodput(self.spent) or 0.0
