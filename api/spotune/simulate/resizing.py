"""When a simulated worker group leaves before a loss or grows: the driver's own decisions, with what it would measure.

That is the simulated durations, once there was a commit, and how long earlier replacements took on the trace.
"""

from __future__ import annotations

from spotune.resize.growing import Grow, MoreSlots, decide_growing
from spotune.resize.leaving import LeaveDecision, Notice, decide_leaving
from spotune.resize.replacements import ReplacementTimes
from spotune.resize.times import MeasuredTimes
from spotune.simulate.supply import NodeSupply
from spotune.simulate.terms import Scenario, Timings


class ResizeDecisions:
    """The decisions of one simulated job.

    Args:
        scenario: The user's choices.
        times: Durations of all activities.
    """

    def __init__(self, scenario: Scenario, times: Timings) -> None:
        self._scenario = scenario
        self._times = times
        self._replacements = ReplacementTimes()
        self.measured: MeasuredTimes | str = "there was no commit yet"

    def count_slots(self, supply: NodeSupply) -> None:
        """Count the slots, to measure how long replacements take."""
        staying, desired = supply.workers - supply.going, self._scenario.workers
        self._replacements.observe(nodes=staying, ready=supply.slots, desired=desired, now=supply.seconds)

    def record_commit(self) -> None:
        """Record that there was a commit: from now on the durations count as measured."""
        times = self._times
        sizes = range(1, self._scenario.workers + 1)
        step = {workers: times.step_seconds(workers) + times.data_wait for workers in sizes}
        change = {"start": times.start_up, "restore": times.restore}
        self.measured = MeasuredTimes(step, times.commit, times.stall, change)

    def on_notice(self, workers: int, slots: int, deadline: float, steps: float, now: float) -> LeaveDecision:
        """Decide what a group does before a node is lost.

        Args:
            workers: Of the group.
            slots: Workers that have a slot after the loss.
            deadline: Seconds until the loss.
            steps: Number of steps until the last one.
            now: Seconds since the start of the trace.
        """
        notice = Notice(
            workers=workers,
            slots=slots,
            minimum=self._scenario.min_workers,
            deadline_seconds=deadline,
            steps=steps,
            arrivals=self._replacements.arrivals(max(1, workers - slots), now),
            regrow_seconds=self._scenario.resize_cooldown,
            steady_seconds=self._times.steady,
            patience_seconds=self._times.patience,
        )
        return decide_leaving(notice, self.measured)

    def grows(self, workers: int, slots: int, steps: float, now: float) -> bool:
        """Whether a group leaves for a larger one now.

        Args:
            workers: Of the group.
            slots: Workers that a larger group could have.
            steps: Number of steps until the last one.
            now: Seconds since the start of the trace.
        """
        if slots <= workers:
            return False
        more = MoreSlots(
            workers=workers,
            slots=slots,
            desired=self._scenario.workers,
            steps=steps,
            arrivals=self._replacements.arrivals(1, now) if self._replacements.missing() else (),
            regrow_seconds=self._scenario.resize_cooldown,
            steady_seconds=self._times.steady,
        )
        return decide_growing(more, self.measured).choice is Grow.GROW
