"""Judges every second of a status: it may be wrong only for as long as a status may be old."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from tests.cluster.faults.status_invariants import SECONDS_APART, SECONDS_OLD, Times
from tests.cluster.status_history import ObservedJob

IsWrong = Callable[[float, ObservedJob], bool]
"""Whether a status is wrong in a second."""


def wrong_for_too_long(
    statuses: Sequence[ObservedJob], is_wrong: IsWrong, operator_downtime: Times, what: str
) -> Iterator[str]:
    """Yield a message for each time in which the status was wrong in every second for too long.

    Args:
        statuses: all observed statuses, oldest first.
        is_wrong: judges one second.
        operator_downtime: the times in which the operator could not know; they do not count, nor the time after them
            in which a status may be old.
        what: what the status did, for the message.
    """
    since: float | None = None
    for second, status in _seconds(statuses):
        if not is_wrong(second, status) or _is_excused(operator_downtime, second):
            if since is not None and second - since > SECONDS_OLD + SECONDS_APART:
                yield f"the status {what} for {second - since:.0f} s from {since:.0f} on"
            since = None
        elif since is None:
            since = second
    if since is not None and statuses and statuses[-1].time - since > SECONDS_OLD + SECONDS_APART:
        yield f"the status {what} from {since:.0f} on until the end"


def _seconds(statuses: Sequence[ObservedJob]) -> Iterator[tuple[float, ObservedJob]]:
    """Every second with the status that was the last one then."""
    if not statuses:
        return
    times = [each.time for each in statuses]
    for second in range(math.ceil(times[0]), math.ceil(times[-1])):
        yield float(second), statuses[bisect_left(times, float(second)) - 1 if second > times[0] else 0]


def _is_excused(operator_downtime: Times, time: float) -> bool:
    """Whether the operator could not know: it did not run or see, or began to only within the age of a status."""
    return any(begin - SECONDS_APART <= time <= end + SECONDS_OLD for begin, end in operator_downtime)
