"""Measured times of a run, and the training time that an interruption loses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_MARGIN_SECONDS = 3.0
"""A node may be lost this much before its deadline."""


@dataclass(frozen=True)
class MeasuredTimes:
    """What a run has measured of itself, in seconds.

    Attributes:
        step: one step, by number of workers; at least that of the running group.
        commit: from the start of a commit until it is durable.
        stall: the part of it for which training waits, if training goes on after it.
        change: from the end of a worker group to the first step of the next one, by part.
    """

    step: Mapping[int, float]
    commit: float
    stall: float
    change: Mapping[str, float]

    @property
    def change_seconds(self) -> float:
        """Seconds of a change of the worker group, without its commit and without waiting for nodes."""
        return math.fsum(self.change.values())

    def step_seconds(self, workers: int) -> float:
        """Seconds of a step with so many workers."""
        return scaled_step_seconds(self.step, workers)


class Phase(NamedTuple):
    """A time in which the number of workers that make steps does not change; 0: no step counts."""

    seconds: float
    workers: int


def scaled_step_seconds(measured: Mapping[int, float], workers: int) -> float:
    """Seconds of a step with so many workers. Numbers that were not measured scale inversely from the nearest one.

    Args:
        measured: seconds of a step by number of workers; not empty.
        workers: at least 1.
    """
    if workers in measured:
        return measured[workers]
    nearest = min(measured, key=lambda count: (abs(math.log(count / workers)), count))
    return measured[nearest] * nearest / workers


def seconds_before_deadline(commit_seconds: float, step_seconds: float) -> float:
    """How long before the deadline of its node a group has to decide to leave.

    A commit may take longer than the last one. By the time of the next decision another step has passed, and the commit
    begins a step after the decision.
    """
    return 1.5 * commit_seconds + _MARGIN_SECONDS + 2 * step_seconds


def lost_seconds(
    phases: Iterable[Phase], finally_workers: int, steps: float, times: MeasuredTimes, reference: int
) -> float:
    """How much later the last step is done than without an interruption.

    Args:
        phases: what happens from now on.
        finally_workers: workers after the last phase, until the last step.
        steps: number of steps until the last one; may be infinite.
        times: of the run.
        reference: number of workers without an interruption.
    """
    lost, undisturbed = 0.0, times.step_seconds(reference)
    for phase in phases:
        if phase.workers == 0:
            lost += phase.seconds
            continue
        step_seconds = times.step_seconds(phase.workers)
        done = min(steps, phase.seconds / step_seconds)
        lost += _slower(done, step_seconds - undisturbed)
        if done >= steps:
            return lost
        steps -= done
    return lost + _slower(steps, times.step_seconds(finally_workers) - undisturbed)


def _slower(steps: float, seconds: float) -> float:
    """Seconds lost in steps that are each slower by so many; the number of steps may be infinite."""
    return steps * seconds if seconds else 0.0
