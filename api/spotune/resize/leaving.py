"""What a worker group does when a node of its workers is going to be lost. A pure function.

Compared are the ways to act on the notice, each by the training time that it is expected to lose: how much later the
last step is done than if the group could stay. What is expected to happen after the group has committed and left:

- If there are as many slots as the group has workers, a group of that size follows at once.
- Otherwise the driver waits for so many slots, at most for its patience. If they come, a group of that size follows.
- If they do not, a smaller group follows, if it may be as small. Once the slots are there and have been for a while,
  and the smaller group has run for `workers.resizeCooldown`, it commits and leaves for one of the former size.

When a replacement comes is uncertain. So each way is evaluated at each of the arrivals that are expected, and the mean
counts. A node may also be lost before its deadline. Then the steps since the commit at the notice are made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from spotune.resize.times import MeasuredTimes, Phase, lost_seconds, seconds_before_deadline

DEFAULT_PATIENCE_SECONDS = 30.0
"""How long the driver waits for all desired workers if nothing was decided."""
_LATER_THAN_EXPECTED = 1.1
"""A replacement may take so much longer than earlier ones; the driver waits for it as much longer."""


class Leave(StrEnum):
    """A way to act on a notice. The values are those in the ledger."""

    LEAVE_NOW = "leaveNow"
    """Commit and leave at once. The next group starts without waiting, with the slots that there are."""
    WAIT = "waitForReplacement"
    """Train on until just before the deadline, commit and leave. Then wait for a replacement, for a limited time."""
    TRAIN_ON = "trainOn"
    """Train on until just before the deadline, commit and leave. The next group starts without waiting."""
    DEFAULT = "default"
    """Train on until just before the deadline, commit and leave. Then wait for a replacement for half a minute."""


@dataclass(frozen=True)
class Notice:
    """A notice, and what is expected to follow it.

    Attributes:
        workers: of the running group.
        slots: workers that the next group could have if the group left now.
        minimum: workers that a group needs.
        deadline_seconds: from now until the node may be lost; None: no deadline.
        steps: number of steps until the last one; may be infinite.
        arrivals: seconds from now until there are slots for `workers` again, one value for each estimate.
        regrow_seconds: from the start of a smaller group until it may leave for a larger one.
        steady_seconds: how long slots must have been there before a group leaves for them.
        lost_early: share of nodes that are lost before their deadline.
        patience_seconds: how long the driver waits for workers if nothing is decided.
    """

    workers: int
    slots: int
    minimum: int
    deadline_seconds: float | None
    steps: float
    arrivals: tuple[float, ...]
    regrow_seconds: float = 600.0
    steady_seconds: float = 10.0
    lost_early: float = 0.0
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS


@dataclass(frozen=True)
class LeaveDecision:
    """What to do on a notice.

    Attributes:
        choice: the way.
        leave_after_seconds: from now until the group begins its last commit; None: no commit fits before the deadline.
        patience_seconds: how long the driver waits for workers afterwards, before it starts with fewer.
        reason: for logs and status.
        lost_seconds: expected lost training time of each way that is possible; empty if it is not known.
    """

    choice: Leave
    leave_after_seconds: float | None
    patience_seconds: float
    reason: str
    lost_seconds: Mapping[Leave, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Way:
    """A way to act: when to leave (None: never, the node is lost), and how long to wait for replacements then."""

    choice: Leave
    leave_after: float | None
    patience: float


def decide_leaving(notice: Notice, times: MeasuredTimes | str) -> LeaveDecision:
    """The way to act on a notice that is expected to lose the least training time.

    Args:
        notice: what is known.
        times: measured in this run; or what is not measured yet, for the reason. Then the decision is the default.
    """
    if isinstance(times, str):
        return _default(notice, times)
    if notice.slots < notice.workers and not notice.arrivals:
        return _default(notice, "no replacement of a worker has come in this run yet")
    best: dict[Leave, tuple[float, _Way]] = {}
    for way in _ways(notice, times):
        lost = _expected_loss(way, notice, times)
        if way.choice not in best or lost < best[way.choice][0] - 1e-9:
            best[way.choice] = lost, way
    by_preference = [choice for choice in Leave if choice in best]
    choice = min(by_preference, key=lambda each: round(best[each][0], 6))
    way = best[choice][1]
    compared = {each: round(best[each][0], 3) for each in by_preference}
    return LeaveDecision(choice, way.leave_after, way.patience, _reason(way, notice, compared), compared)


def _default(notice: Notice, problem: str) -> LeaveDecision:
    """The decision if nothing can be compared; the worker group itself knows when it has to leave."""
    leave_after = 0.0 if notice.deadline_seconds is None else None
    what = f"{_describe(leave_after, notice, notice.patience_seconds)}: the alternatives are not weighed, because"
    return LeaveDecision(Leave.DEFAULT, leave_after, notice.patience_seconds, f"{what} {problem}")


def _ways(notice: Notice, times: MeasuredTimes) -> Iterator[_Way]:
    """All ways that are possible before the deadline."""
    points = _leaving_points(notice, times)
    last = points[-1]
    suffices = notice.slots >= notice.workers
    patience = notice.patience_seconds if suffices else 0.0  # should a slot be lost meanwhile
    if points[0] is not None:
        yield _Way(Leave.LEAVE_NOW, 0.0, patience)
    yield _Way(Leave.DEFAULT, last, notice.patience_seconds)
    if last != 0.0:
        yield _Way(Leave.TRAIN_ON, last, patience)
    if suffices:
        return
    for point in points:
        left = _left_at(point, notice, times)
        for arrival in notice.arrivals:
            if arrival > left:
                yield _Way(Leave.WAIT, point, _LATER_THAN_EXPECTED * arrival - left + 1.0)
        yield _Way(Leave.WAIT, point, notice.patience_seconds)


def _leaving_points(notice: Notice, times: MeasuredTimes) -> list[float | None]:
    """When the group may begin its last commit, in seconds from now; [None] if no commit fits before the deadline."""
    if notice.deadline_seconds is None:
        return [0.0]
    latest = notice.deadline_seconds - seconds_before_deadline(times.commit, times.step_seconds(notice.workers))
    if latest > 0:
        return [0.0, latest]
    return [0.0] if notice.deadline_seconds >= times.commit + times.step_seconds(notice.workers) else [None]


def _left_at(leave_after: float | None, notice: Notice, times: MeasuredTimes) -> float:
    """When the group has left, in seconds from now."""
    if leave_after is None:
        assert notice.deadline_seconds is not None, "without a deadline a commit fits"
        return notice.deadline_seconds
    return leave_after + times.commit


def _expected_loss(way: _Way, notice: Notice, times: MeasuredTimes) -> float:
    """Expected lost training time of a way, in seconds."""
    arrivals = notice.arrivals or (0.0,)  # without any, there are slots already
    return fmean(_loss(way, notice, times, arrival) for arrival in arrivals)


def _loss(way: _Way, notice: Notice, times: MeasuredTimes, arrival: float) -> float:
    """Lost training time of a way in seconds, if replacements arrive at that time."""
    left = _left_at(way.leave_after, notice, times)
    if way.leave_after is None:
        return _loss_after([Phase(left, 0)], left, way.patience, notice, times, arrival)
    before = [Phase(times.commit, 0)]
    if way.leave_after > 0:
        stalled = min(times.stall, way.leave_after)
        before = [Phase(stalled, 0), Phase(way.leave_after - stalled, notice.workers), *before]
    kept = _loss_after(before, left, way.patience, notice, times, arrival)
    if notice.lost_early == 0 or notice.deadline_seconds is None:
        return kept
    lost_at = notice.deadline_seconds / 2
    if left <= lost_at:
        return kept
    early = _loss_after([Phase(lost_at, 0)], lost_at, way.patience, notice, times, arrival)
    return (1 - notice.lost_early) * kept + notice.lost_early * early


def _loss_after(
    before: list[Phase], left: float, patience: float, notice: Notice, times: MeasuredTimes, arrival: float
) -> float:
    """Lost training time in seconds, if the group ends at `left`, after the phases `before`."""
    change = times.change_seconds
    full = notice.workers
    if notice.slots >= full or arrival <= left:
        return lost_seconds([*before, Phase(change, 0)], full, notice.steps, times, full)
    if notice.slots < notice.minimum or arrival <= left + patience:
        phases = [*before, Phase(arrival - left, 0), Phase(change, 0)]
        return lost_seconds(phases, full, notice.steps, times, full)
    phases = [*before, Phase(patience, 0), Phase(change, 0)]
    started = left + patience + change
    regrown = max(arrival + notice.steady_seconds, started + notice.regrow_seconds)
    smaller, again = Phase(regrown - started, notice.slots), Phase(times.commit + change, 0)
    return min(
        lost_seconds(phases, notice.slots, notice.steps, times, full),
        lost_seconds([*phases, smaller, again], full, notice.steps, times, full),
    )


def _reason(way: _Way, notice: Notice, compared: Mapping[Leave, float]) -> str:
    """The chosen way, its expected loss and those of the others."""
    others = ", ".join(
        f"{_NAMES[choice]} {seconds:.1f} s"
        for choice, seconds in compared.items()
        if choice is not way.choice and choice in _NAMES
    )
    instead = f"; {others}" if others else ""
    what = _describe(way.leave_after, notice, way.patience)
    return f"{what}: loses {compared[way.choice]:.1f} s of training{instead}"


_NAMES = {
    Leave.LEAVE_NOW: "leaving at once",
    Leave.WAIT: "waiting for a replacement",
    Leave.TRAIN_ON: "training on and not waiting",
    Leave.DEFAULT: f"training on and waiting for {DEFAULT_PATIENCE_SECONDS:.0f} s",
}


def _describe(leave_after: float | None, notice: Notice, patience: float) -> str:
    """When the group leaves, and what the next one waits for."""
    if leave_after == 0.0:
        when = "the workers commit and leave at once"
    else:
        when = "the workers train on until just before the deadline"
    if notice.slots >= notice.workers:
        return f"{when}, and as many continue"
    if notice.slots < notice.minimum:
        return f"{when}, and training waits for a replacement"
    if patience > 0:
        return f"{when}, and training waits up to {patience:.0f} s for a replacement"
    return f"{when}, and {notice.slots} of {notice.workers} continue"
