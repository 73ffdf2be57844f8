"""Where the time of a job went, over all of its drivers and generations: the ledger in, seconds by part out.

Time is a line from the first attempt's start to now. Events cut it, and every piece belongs to one part, so the parts
sum to the wall clock whatever the ledger says. A generation's piece is divided further by what its rank 0 measured
(`stopwatch.py`). Counted in whole milliseconds, which add up exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotune.goodput import Part

ACCOUNTED_EVENTS = frozenset(
    {
        "attempt-started",
        "attempt-ended",
        "waiting",
        "failure",
        "generation-started",
        "generation-ended",
        "stopped",
        "finished",
    }
)
"""Events that say where time goes; the others of a ledger are passed over."""

_FINAL_EXIT_CODES = (0, 20, 30)
"""Of a driver after which nobody starts the next one by himself."""

Record = Mapping[str, Any]
Seconds = dict[Part, float]


@dataclass(frozen=True)
class Tally:
    """What is known of the time up to `since`, and what goes on from there.

    Attributes:
        spent: milliseconds by part.
        since: when the last event was, in milliseconds since the epoch; None before the first.
        part: what goes on.
        generation: the worker group that runs, None where none does.
    """

    spent: Mapping[Part, int]
    since: int | None
    part: Part
    generation: int | None

    def seconds(self, now: float, measured: Mapping[str, float] | None = None, doing: Part | None = None) -> Seconds:
        """Seconds by part until `now`.

        Args:
            now: seconds since the epoch; what lies before the last event does not count.
            measured: of the generation that runs, by its rank 0 so far.
            doing: what this rank is doing: the time of which it has not said anything yet.
        """
        spent = Counter(self.spent)
        if self.since is not None:
            length = max(0, _milliseconds(now) - self.since)
            if self.generation is None:
                measured, doing = None, None
            spent.update(_divide(length, measured or {}, doing or self.part))
        return {part: spent[part] / 1000 for part in Part}


@dataclass(frozen=True)
class _Mark:
    """Something begins: a part, or the piece of a generation until `end`."""

    time: int
    part: Part
    number: int = 0
    end: int | None = None
    parts: Mapping[str, float] | None = None
    lost: int = 0
    sets_out: bool = False


def tally(records: Iterable[Record]) -> Tally:
    """What the events of a ledger, in their order, say about the time until the last of them."""
    marks = sorted(_marks([record for record in records if record["event"] in ACCOUNTED_EVENTS]), key=_time)
    spent: Counter[Part] = Counter()
    cursor = marks[0].time if marks else None
    part, generation = Part.STARTUP, None
    for index, mark in enumerate(marks):
        assert cursor is not None, "it was set to the first mark's time"
        spent[part] += max(0, mark.time - cursor)
        cursor = max(cursor, mark.time)
        generation = None
        if part is not Part.STOPPED or mark.sets_out:
            part = mark.part
        if mark.parts is not None and mark.end is not None:
            end = max(cursor, mark.end)
            spent.update(_divide(end - cursor, mark.parts, Part.LOST))
            cursor = end
        elif mark.number and index == len(marks) - 1:
            generation = mark.number
        rolled_back = min(mark.lost, spent[Part.PRODUCTIVE])
        spent.update({Part.PRODUCTIVE: -rolled_back, Part.LOST: rolled_back})
    return Tally(spent, cursor, part, generation)


def _marks(records: Sequence[Record]) -> list[_Mark]:
    ended: dict[int, Record] = {}
    for record in records:
        if record["event"] == "generation-ended":
            ended.setdefault(record["generation"], record)
    starts = sorted(_at(record) for record in records if record["event"] in ("attempt-started", "generation-started"))
    return [mark for record in records for mark in _marks_of(record, ended, starts)]


def _marks_of(record: Record, ended: Mapping[int, Record], starts: Sequence[int]) -> list[_Mark]:
    at = _at(record)
    match record["event"]:
        case "attempt-started":
            return [_Mark(at, Part.STARTUP, sets_out=True)]
        case "waiting" | "failure":
            return [_Mark(at, Part.WAITING)]
        case "stopped" | "finished":
            return [_Mark(at, Part.STOPPED)]
        case "attempt-ended":
            last_seen = record.get("lastSeen")
            seen = min(at, _milliseconds(last_seen)) if last_seen is not None else at
            goes_on = record["exitCode"] not in _FINAL_EXIT_CODES
            return [_Mark(seen, Part.WAITING if goes_on else Part.STOPPED)]
        case "generation-started":
            number = record["generation"]
            planned = at - _milliseconds(record.get("planSeconds", 0.0))
            marks = [_Mark(planned, Part.STARTUP)]
            lost = _milliseconds(record.get("secondsLost", 0.0))
            if number not in ended:
                return [*marks, _Mark(at, Part.STARTUP, number, lost=lost)]
            end = at + _milliseconds(ended[number]["seconds"])
            # A lost head's workers may outlive it: their time is their successor's as soon as there is one.
            end = min(end, next((start for start in starts if start > at), end))
            return [*marks, _Mark(at, Part.STARTUP, number, end, ended[number].get("parts", {}), lost)]
    return []


def generation_parts(
    progress: Record | None, began: float, seconds: float, steps_seconds: float, *, failed: bool
) -> dict[str, float]:
    """Seconds by part of a generation that has ended; they sum to `seconds`.

    Args:
        progress: its `progress.json`; None where its workers never began.
        began: when it was started, in seconds since the epoch.
        seconds: from then to its end.
        steps_seconds: productive seconds of the steps that it logged.
        failed: whether it ended otherwise than it was meant to. What it did after its last logged step is lost then.
    """
    measured = measured_parts(progress, began) if progress else {}
    if failed and progress:
        under_way = measured.get(Part.PRODUCTIVE, 0.0) - steps_seconds
        measured |= {Part.PRODUCTIVE: steps_seconds, Part.LOST: max(0.0, under_way)}
    rest = Part.LOST if failed and progress else Part.STARTUP
    divided = _divide(_milliseconds(seconds), measured, rest)
    return {str(part): divided[part] / 1000 for part in Part if divided[part]}


def measured_parts(progress: Record, began: float) -> dict[str, float]:
    """Seconds by part since a generation began, as its rank 0 measured them; its process had to be started first."""
    measured = dict(progress.get("seconds", {}))
    measured[Part.STARTUP] = measured.get(Part.STARTUP, 0.0) + max(0.0, progress["startedAt"] - began)
    return measured


def _divide(length: int, measured: Mapping[str, float], rest: Part) -> Counter[Part]:
    """A length of time by part, productive last where it is too short for all; what nobody measured goes to `rest`."""
    divided: Counter[Part] = Counter()
    left = length
    for part in reversed(Part):
        divided[part] = min(left, max(0, _milliseconds(measured.get(part, 0.0))))
        left -= divided[part]
    divided[rest] += left
    return divided


def _time(mark: _Mark) -> int:
    return mark.time


def _at(record: Record) -> int:
    return _milliseconds(record["time"])


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
