"""Whether a worker group leaves for a larger one, once there are slots for more workers. A pure function.

A change of the group costs a commit and a start. So the group grows only if the steps that remain gain more than that.
If yet another worker is expected soon, two changes may cost more than to train with the present workers until then. And
a group that commits soon anyway waits for that commit, instead of making one more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from spotune.resize.times import MeasuredTimes, Phase, lost_seconds


class Grow(StrEnum):
    """A way to act on more slots. The values are those in the ledger."""

    GROW = "grow"
    """Commit, and leave for a larger group."""
    WAIT_FOR_MORE = "waitForMore"
    """Train on: another worker is expected, and one change is cheaper than two."""
    KEEP = "keep"
    """Train on: a change costs more than it gains."""


@dataclass(frozen=True)
class MoreSlots:
    """Slots for a larger group, and what is expected.

    Attributes:
        workers: of the running group.
        slots: workers that a larger group could have now.
        desired: workers that the job asks for.
        steps: number of steps until the last one; may be infinite.
        arrivals: seconds from now until there is one slot more, one value for each estimate; empty: unknown.
        regrow_seconds: from the start of a group until it may leave for a larger one.
        steady_seconds: how long slots must have been there before a group leaves for them.
    """

    workers: int
    slots: int
    desired: int
    steps: float
    arrivals: tuple[float, ...] = ()
    regrow_seconds: float = 600.0
    steady_seconds: float = 10.0


@dataclass(frozen=True)
class GrowDecision:
    """What to do with more slots.

    Attributes:
        choice: the way.
        commit_within_seconds: how long the group waits for a commit that is due, before it makes one to leave.
        reason: for logs and status.
        lost_seconds: expected lost training time of each way, compared with all workers that there are slots for or
            that are expected, from now on and without a change. Empty if it is not known.
    """

    choice: Grow
    commit_within_seconds: float
    reason: str
    lost_seconds: Mapping[Grow, float] = field(default_factory=dict)


def decide_growing(more: MoreSlots, times: MeasuredTimes | str) -> GrowDecision:
    """The way to act on more slots that is expected to lose the least training time.

    Args:
        more: what is known.
        times: measured in this run; or what is not measured yet, for the reason. Then the group grows at once.
    """
    if isinstance(times, str):
        return GrowDecision(Grow.GROW, 0.0, f"the gain is not weighed, because {times}")
    expects_more = more.slots < more.desired and bool(more.arrivals)
    reference = more.slots + 1 if expects_more else more.slots
    if expects_more:
        lost = {
            Grow.GROW: fmean(_loss_of_growing_twice(more, times, arrival) for arrival in more.arrivals),
            Grow.WAIT_FOR_MORE: fmean(_loss_of_waiting(more, times, arrival) for arrival in more.arrivals),
        }
    else:
        lost = {Grow.GROW: _loss_of_growing(more, times, reference)}
    lost[Grow.KEEP] = lost_seconds([], more.workers, more.steps, times, reference)
    choice = min(lost, key=lambda each: round(lost[each], 6))
    compared = {each: round(seconds, 3) for each, seconds in lost.items()}
    others = ", ".join(f"{_NAMES[each]} {seconds:.1f} s" for each, seconds in compared.items() if each is not choice)
    reason = f"{_NAMES[choice]} loses {compared[choice]:.1f} s of training; {others}"
    return GrowDecision(choice, _commit_within(more, times), reason, compared)


_NAMES = {
    Grow.GROW: "growing now",
    Grow.WAIT_FOR_MORE: "waiting for one more worker",
    Grow.KEEP: "keeping the group",
}


def _loss_of_growing(more: MoreSlots, times: MeasuredTimes, reference: int) -> float:
    """Lost training time of a change now, in seconds."""
    change = Phase(times.commit + times.change_seconds, 0)
    return lost_seconds([change], more.slots, more.steps, times, reference)


def _loss_of_growing_twice(more: MoreSlots, times: MeasuredTimes, arrival: float) -> float:
    """Lost training time of a change now, and of another one once another worker has arrived, if that pays."""
    change = Phase(times.commit + times.change_seconds, 0)
    again = max(arrival + more.steady_seconds, change.seconds + more.regrow_seconds)
    phases = [change, Phase(again - change.seconds, more.slots), change]
    twice = lost_seconds(phases, more.slots + 1, more.steps, times, more.slots + 1)
    return min(_loss_of_growing(more, times, more.slots + 1), twice)


def _loss_of_waiting(more: MoreSlots, times: MeasuredTimes, arrival: float) -> float:
    """Lost training time of a single change, once another worker has arrived."""
    phases = [Phase(arrival + more.steady_seconds, more.workers), Phase(times.commit + times.change_seconds, 0)]
    return lost_seconds(phases, more.slots + 1, more.steps, times, more.slots + 1)


def _commit_within(more: MoreSlots, times: MeasuredTimes) -> float:
    """How long to wait for a commit that is due: until the wait has lost as much as one more commit costs."""
    slower = 1 - times.step_seconds(more.slots) / times.step_seconds(more.workers)
    return times.stall / slower if slower > 0 else 0.0
