"""Decides for a running worker group whether and when it leaves for another one, and records why.

The decisions are pure functions in `spotune.resize`. This module gives them what the run has measured, and describes
them for the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spotune.job import WorkersSpec
from spotune.resize.growing import GrowDecision, MoreSlots, decide_growing
from spotune.resize.leaving import LeaveDecision, Notice, decide_leaving
from spotune.resize.replacements import ReplacementTimes
from spotune.resize.times import MeasuredTimes
from spotune_trainer.driver.world_size.measured_times import lost_early_share, measured_times, steps_left
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.worker_group.result import Slots

STEADY_SECONDS = 10.0
"""How long slots for more workers must exist before the group yields to a larger one."""


@dataclass(frozen=True)
class RunningGroup:
    """A worker group that may leave.

    Attributes:
        generation: its number.
        logs: its folder.
        world_size: its workers.
        planned_minimum: workers that the model needs, for `workers.min: auto`.
    """

    generation: int
    logs: GenerationLogs
    world_size: int
    planned_minimum: int


def replacement_times(ledger: Ledger) -> ReplacementTimes:
    """How long replacements took so far; further ones, and the starts of other nodes, are recorded in the ledger."""

    def record(seconds: float | None, start_seconds: float | None) -> None:
        started = {} if start_seconds is None else {"startSeconds": round(start_seconds, 3)}
        if seconds is None:
            ledger.append("joined", **started)
        else:
            ledger.append("replaced", seconds=round(seconds, 3), **started)

    return ReplacementTimes(ledger.replacement_seconds(), record)


class Resizing:
    """Decides for one worker group.

    Args:
        group: the running one.
        ledger: of the job; has what earlier groups have measured.
        replacements: how long replacements took in this run.
    """

    def __init__(self, group: RunningGroup, ledger: Ledger, replacements: ReplacementTimes) -> None:
        self.group = group
        self.replacements = replacements
        self.ledger = ledger

    def observe(self, slots: Slots, workers: WorkersSpec, now: float) -> None:
        """Count the slots, to measure how long replacements take."""
        self.replacements.observe(nodes=slots.nodes, ready=slots.imported, desired=workers.world_size, now=now)

    def on_notice(
        self, slots: Slots, seconds: float | None, workers: WorkersSpec, now: float
    ) -> tuple[LeaveDecision, dict[str, Any]]:
        """Decide what to do before a node is lost.

        Args:
            slots: of nodes that are to remain.
            seconds: until the node is lost; None: no deadline.
            workers: of the job.
            now: seconds, monotonic.

        Returns:
            The decision, and its values for the ledger.
        """
        group, times = self.group, self._times()
        remaining = min(slots.ready, group.world_size)
        notice = Notice(
            workers=group.world_size,
            slots=remaining,
            minimum=group.planned_minimum if workers.min == "auto" else workers.min_world_size,
            deadline_seconds=None if seconds is None else max(0.0, seconds),
            steps=steps_left(group.logs),
            arrivals=self.replacements.arrivals(max(1, group.world_size - remaining), now),
            regrow_seconds=workers.resize_cooldown.seconds,
            steady_seconds=STEADY_SECONDS,
            lost_early=lost_early_share(self.ledger),
        )
        decision = decide_leaving(notice, times)
        values = {
            **self._values(decision, times, notice.steps),
            "slots": slots.ready,
            "arrivalSeconds": [round(arrival, 1) for arrival in notice.arrivals],
            "lostEarly": round(notice.lost_early, 3),
            "patienceSeconds": round(decision.patience_seconds, 1),
        }
        return decision, values

    def on_more_slots(self, slots: Slots, workers: WorkersSpec, now: float) -> tuple[GrowDecision, dict[str, Any]]:
        """Decide whether to leave for a larger group; returns the decision, and its values for the ledger."""
        group, times = self.group, self._times()
        possible = min(slots.imported, workers.world_size)
        more = MoreSlots(
            workers=group.world_size,
            slots=possible,
            desired=workers.world_size,
            steps=steps_left(group.logs),
            arrivals=self.replacements.arrivals(1, now) if self.replacements.missing() else (),
            regrow_seconds=workers.resize_cooldown.seconds,
            steady_seconds=STEADY_SECONDS,
        )
        decision = decide_growing(more, times)
        values = {
            **self._values(decision, times, more.steps),
            "slots": slots.imported,
            "arrivalSeconds": [round(arrival, 1) for arrival in more.arrivals],
            "commitWithinSeconds": round(decision.commit_within_seconds, 3),
        }
        return decision, values

    def _times(self) -> MeasuredTimes | str:
        return measured_times(self.ledger, self.group.logs, self.group.generation)

    def _values(
        self, decision: LeaveDecision | GrowDecision, times: MeasuredTimes | str, steps: float
    ) -> dict[str, Any]:
        """What was compared, for the ledger; JSON has no infinite numbers."""
        measured: Mapping[str, Any] = {}
        if not isinstance(times, str):
            measured = {
                "stepSeconds": {str(workers): round(seconds, 4) for workers, seconds in times.step.items()},
                "commitSeconds": round(times.commit, 3),
                "stallSeconds": round(times.stall, 4),
                "changeSeconds": {part: round(seconds, 3) for part, seconds in times.change.items()},
                "replacementSeconds": [round(seconds, 1) for seconds in self.replacements.seconds],
            }
        return {
            "choice": str(decision.choice),
            "why": decision.reason,
            "lostSeconds": {
                str(choice): seconds if math.isfinite(seconds) else None
                for choice, seconds in decision.lost_seconds.items()
            },
            "stepsLeft": steps if math.isfinite(steps) else None,
            "measured": measured,
        }
