"""Invariants of a FinetuneJob's status, checked against the step times that its workers logged.

`invariant_violations` returns one message per violation; an empty list means that the status was correct throughout.
While no steps are made, the conditions Ready and Training must not be True.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from tests.cluster.faults.timeline import TrainingInterval
from tests.cluster.status_history import ObservedJob

SECONDS_OLD = 30.0
"""Maximum age of a status."""
SECONDS_APART = 2.0
"""Tolerance between the clocks of logged steps, generation starts and observed statuses."""

_BEGINNING = ("Provisioning", "Starting", "Preflight", "Preparing", "WaitingForWorkers", "Loading")
_STEPPING = ("Training", "Evaluating", "Exporting")
_APART = ("Stalled", "Suspending", "Suspended", "Restarting", "Recovering")
_ENDS = ("Complete", "Failed")
_TRUE_TOGETHER = (
    ("Complete", "Failed"),
    ("Ready", "Stalled"),
    ("Ready", "Reconciling"),
    ("Ready", "Failed"),
    ("Ready", "Suspended"),
    ("Stalled", "Reconciling"),
    ("Training", "Complete"),
    ("Training", "Suspended"),
)
"""Conditions of which only one may be True (for the first of them: kstatus)."""


Times = Sequence[tuple[float, float]]
"""Pairs of start and end."""


def invariant_violations(
    history: Sequence[ObservedJob],
    training_intervals: Sequence[TrainingInterval],
    operator_downtime: Times = (),
    *,
    is_own: Callable[[ObservedJob], bool] = lambda _: True,
) -> list[str]:
    """Return a message per status that violates an invariant.

    Args:
        history: All observed statuses, oldest first.
        training_intervals: The times in which worker groups made steps.
        operator_downtime: The times without an operator; the status cannot change then.
        is_own: Whether the operator alone wrote a status. Of others, only the conditions count.
    """
    written = [seen for seen in history if "phase" in seen.status]
    reported = [seen for seen in written if is_own(seen)]
    found = [f"{_when(first)}: the first phase" for first in _firsts(reported) if not _may_begin(first)]
    for check, statuses in ((_check_order, reported), (_check_transition_times, written)):
        for before, after in pairwise(statuses):
            if before.uid == after.uid:
                found += [f"{_when(after)}: {sentence}" for sentence in check(before, after)]
    for seen in reported:
        found += [f"{_when(seen)}: {sentence}" for sentence in _check_conditions(seen)]
    return [*found, *_check_steps(reported, training_intervals, operator_downtime)]


def _when(seen: ObservedJob) -> str:
    return f"{seen.time:.1f}, {seen.status['phase']}, step {seen.status['step']}"


def _firsts(reported: Sequence[ObservedJob]) -> list[ObservedJob]:
    """The first status of each object: a job that was deleted may have been applied again."""
    return [seen for number, seen in enumerate(reported) if number == 0 or reported[number - 1].uid != seen.uid]


def _may_begin(first: ObservedJob) -> bool:
    return first.status["phase"] in ("Provisioning", "Stalled", "Suspended")


def _check_order(before: ObservedJob, after: ObservedJob) -> Iterator[str]:
    """Phases are in order, counters never decrease, and a final phase stays until the job is changed."""
    was, now = before.status["phase"], after.status["phase"]
    if now not in (*_BEGINNING, *_STEPPING, *_APART, *_ENDS):
        yield f"there is no phase {now!r}"
    changed = before.job["metadata"]["generation"] != after.job["metadata"]["generation"]
    if was in _ENDS and now != was and not changed:
        yield f"{was} was not the end: {now}"
    if now == "Complete" and was not in (*_STEPPING, *_BEGINNING, "Complete"):
        yield f"Complete right after {was}"
    for name in ("generation", "highestStep", "observedGeneration", "stepsLost"):
        if after.status.get(name, 0) < before.status.get(name, 0):
            yield f"{name} went back from {before.status[name]} to {after.status.get(name)}"
    for cause, count in before.status.get("restarts", {}).items():
        if after.status["restarts"].get(cause, 0) < count:
            yield f"restarts.{cause} went back from {count}"
    if after.status["generation"] == before.status["generation"] and after.status["step"] < before.status["step"]:
        yield f"went back from step {before.status['step']} within generation {after.status['generation']}"


def _check_transition_times(before: ObservedJob, after: ObservedJob) -> Iterator[str]:
    """`lastTransitionTime` changes if and only if the status changes; no condition is removed."""
    now = {condition["type"]: condition for condition in after.status["conditions"]}
    for condition in before.status.get("conditions", []):
        kind, later = condition["type"], now.get(condition["type"])
        if later is None:
            yield f"condition {kind} was dropped"
        elif (condition["status"] == later["status"]) != (
            condition["lastTransitionTime"] == later["lastTransitionTime"]
        ) and not _within_one_second(condition, later):
            yield f"{kind}: {condition['status']} to {later['status']}, and its lastTransitionTime says otherwise"


def _within_one_second(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether the status changed twice within one second. Times are whole seconds, so both have the same time."""
    return bool(before["status"] != after["status"] and before["lastTransitionTime"] == after["lastTransitionTime"])


def _check_conditions(seen: ObservedJob) -> Iterator[str]:
    for first, second in _TRUE_TOGETHER:
        if seen.holds(first) and seen.holds(second):
            yield f"{first} and {second} at once"
    if seen.holds("Training") and not seen.holds("PreflightPassed"):
        yield "Training before PreflightPassed"
    ready = seen.holds("Ready")
    if ready and not (seen.holds("Training") or seen.holds("Complete")):
        yield "Ready, and neither Training nor Complete"
    if seen.status["phase"] in _ENDS and not seen.holds(seen.status["phase"]):
        yield "the phase says an end that no condition says"
    restarts = seen.status.get("restarts", {})
    if restarts.get("total", 0) != sum(count for cause, count in restarts.items() if cause != "total"):
        yield f"restarts do not add up: {restarts}"


def _check_steps(
    reported: Sequence[ObservedJob], training_intervals: Sequence[TrainingInterval], operator_downtime: Times
) -> Iterator[str]:
    """Without steps, Ready and Training may be True only until the detection deadline, and not again later."""
    gaps = [(before.end, after.begin) for before, after in pairwise(training_intervals)]
    first = training_intervals[0].begin if training_intervals else float("inf")
    for begin, end in [(0.0, first), *gaps]:
        for kind in ("Ready", "Training"):
            yield from _check_gap(reported, kind, begin, end, _detection_deadline(begin, operator_downtime))


def _detection_deadline(begin: float, operator_downtime: Times) -> float:
    """The time by which the status must show that no steps are made since `begin`."""
    known = begin + SECONDS_OLD
    for left, back in operator_downtime:
        if left <= known <= back + SECONDS_OLD:
            known = back + SECONDS_OLD
    return known


def _check_gap(reported: Sequence[ObservedJob], kind: str, begin: float, end: float, known: float) -> Iterator[str]:
    within = [seen for seen in reported if begin + SECONDS_APART < seen.time < end - SECONDS_APART]
    found_out = begin == 0.0
    for seen in within:
        holds = seen.holds(kind)
        if holds and found_out:
            yield f"{_when(seen)}: {kind} again, {end - seen.time:.1f} s before the next step began"
        found_out = found_out or not holds
    last_before = next((seen for seen in reversed(reported) if seen.time <= known), None)
    if end > known + SECONDS_APART and last_before is not None and last_before.holds(kind):
        yield f"{kind} {known - begin:.0f} s after the last step, which was done at {begin:.1f}"
