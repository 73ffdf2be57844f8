"""Where the time of a job went: events of the ledger in, seconds by part out.

The wall clock from the first attempt to now is one line. Events cut it into intervals, and each interval counts as one
`Part`, so the parts sum to the wall clock whatever the ledger holds. An example: a job loses a worker after 65 s, and
its second worker group starts from a checkpoint that lies 15 s of training before the loss::

    time      0         5                                       65          73        75              now
              |         |                                       |           |         |               |
    events    attempt-  generation-                             generation- (planning generation-
              started   started 1                               ended 1,     begins)  started 2,
                                                                failure               planSeconds 2,
                                                                                      secondsLost 15
              |         |                                       |           |         |               |
    counts    | startup | generation 1, divided by what its     |  waiting  | startup | generation 2, |
    as        |         | rank 0 measured:                      |           |         | as measured   |
              |         | startup 10 | productive 45 | lost 5   |           |         | so far        |
                                     |  30   |  15   |
                                             |___.___|
                                                 |
                      rolled back: lost, too, as soon as generation 2 starts without these steps

    result    startup 5 + 10 + 2, productive 45 - 15, lost 5 + 15, waiting 8, and what generation 2 measured

The rules behind the picture:

1. An event begins a part, which lasts until the next event:

   ===========================================  ========  =======================================
   event                                        begins    from
   ===========================================  ========  =======================================
   attempt-started                              startup   its time
   generation-started                           startup   `planSeconds` before its time (planning)
   waiting, failure                             waiting   its time
   attempt-ended, another attempt follows       waiting   `lastSeen`, the driver's last sign of life
   attempt-ended for good                       stopped   `lastSeen`, too; its time if not recorded
   stopped, finished                            stopped   its time
   ===========================================  ========  =======================================

2. A stopped job stays stopped until the next attempt-started, whatever late events are recorded in between.
3. A generation that has ended fills the interval [start, start + `seconds`), cut short at the next start of an attempt
   or a generation. Within it the measured `parts` count, and time that they do not cover is lost. What follows until
   the next event is startup (processes end).
4. `secondsLost` of a generation's start moves from productive to lost: steps after the checkpoint that it restores.
5. The interval since the last event is open. `TimeBreakdown.seconds` closes it at a given time; if a generation runs,
   it is divided by what its rank 0 has measured so far (`stopwatch.py`).
6. A generation that trained on without its driver, and was adopted by the next one, runs through: events of the lost
   driver between its start and `adopted` cut nothing.

Everything is counted in whole milliseconds, which add up exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotune.goodput import Part

TIMELINE_EVENTS = frozenset(
    {
        "attempt-started",
        "attempt-ended",
        "waiting",
        "failure",
        "generation-started",
        "generation-ended",
        "adopted",
        "stopped",
        "finished",
    }
)
"""Events that cut the timeline; `time_breakdown` ignores all others of a ledger."""

_FINAL_EXIT_CODES = (0, 20, 30)
"""Exit codes of a driver after which the supervisor starts no other attempt by itself."""

Record = Mapping[str, Any]
SecondsByPart = dict[Part, float]


@dataclass(frozen=True)
class TimeBreakdown:
    """The time of a job: closed intervals by part, and the open interval since the last event.

    Attributes:
        closed: milliseconds by part, up to `open_since`.
        open_since: time of the last event, in milliseconds since the epoch; None before the first.
        open_part: the part that the last event began.
        running_generation: the worker group that runs in the open interval; None if there is none.
    """

    closed: Mapping[Part, int]
    open_since: int | None
    open_part: Part
    running_generation: int | None

    def seconds(
        self, now: float, measured: Mapping[str, float] | None = None, current_part: Part | None = None
    ) -> SecondsByPart:
        """Seconds by part until `now`.

        Args:
            now: seconds since the epoch; a time before the last event counts as the time of that event.
            measured: seconds by part that rank 0 of the running generation has measured so far.
            current_part: what that rank is doing; time of the open interval that `measured` lacks counts as this.
        """
        total = Counter(self.closed)
        if self.open_since is not None:
            length = max(0, _milliseconds(now) - self.open_since)
            if self.running_generation is None:
                measured, current_part = None, None
            total.update(_divide(length, measured or {}, current_part or self.open_part))
        return {part: total[part] / 1000 for part in Part}


@dataclass(frozen=True)
class _PartBegins:
    """From `time` (milliseconds since the epoch) on, the job's time counts as `part`."""

    time: int
    part: Part
    is_new_attempt: bool = False


@dataclass(frozen=True)
class _Run:
    """How a generation ran: until `end` (milliseconds since the epoch), with `measured` seconds by part."""

    end: int
    measured: Mapping[str, float]


@dataclass(frozen=True)
class _GenerationStarts:
    """A worker group starts at `time` (milliseconds since the epoch).

    Attributes:
        generation: its number.
        rolled_back: productive milliseconds of the steps after the checkpoint that it restores.
        run: None while its end is not recorded.
    """

    time: int
    generation: int
    rolled_back: int
    run: _Run | None


_Cut = _PartBegins | _GenerationStarts


def time_breakdown(events: Iterable[Record]) -> TimeBreakdown:
    """The time up to the last event of a ledger, by part; see the rules in the module's docstring.

    Args:
        events: records of the ledger, in its order.
    """
    cuts = _timeline([event for event in events if event["event"] in TIMELINE_EVENTS])
    closed: Counter[Part] = Counter()
    position = cuts[0].time if cuts else None
    part = Part.STARTUP
    for cut in cuts:
        assert position is not None, "it is the time of the first cut"
        closed[part] += max(0, cut.time - position)
        position = max(position, cut.time)
        if isinstance(cut, _PartBegins):
            part = cut.part if part is not Part.STOPPED or cut.is_new_attempt else part
            continue
        part = Part.STARTUP if part is not Part.STOPPED else part
        if cut.run is not None:
            end = max(position, cut.run.end)
            closed.update(_divide(end - position, cut.run.measured, Part.LOST))
            position = end
        rolled_back = min(cut.rolled_back, closed[Part.PRODUCTIVE])
        closed.update({Part.PRODUCTIVE: -rolled_back, Part.LOST: rolled_back})
    return TimeBreakdown(closed, position, part, _running_generation(cuts))


def _running_generation(cuts: Sequence[_Cut]) -> int | None:
    """The generation that started last, if nothing has happened since."""
    last = cuts[-1] if cuts else None
    return last.generation if isinstance(last, _GenerationStarts) and last.run is None else None


def _timeline(events: Sequence[Record]) -> list[_Cut]:
    """Where the events cut the time, in order of time."""
    events = _without_lost_drivers(events)
    ended: dict[int, Record] = {}
    for event in events:
        if event["event"] == "generation-ended":
            ended.setdefault(event["generation"], event)
    starts = sorted(_time(event) for event in events if event["event"] in ("attempt-started", "generation-started"))
    return sorted((cut for event in events for cut in _cuts(event, ended, starts)), key=lambda cut: cut.time)


def _without_lost_drivers(events: Sequence[Record]) -> list[Record]:
    """The events without those of drivers and heads that were lost while a generation trained on.

    A `adopted` event says that a generation has run since its start, whatever was recorded in between.
    """
    started = {event["generation"]: _time(event) for event in events if event["event"] == "generation-started"}
    spans = [
        (started[e["generation"]], _time(e)) for e in events if e["event"] == "adopted" and e["generation"] in started
    ]

    def is_within(event: Record) -> bool:
        is_of_driver = event["event"] in ("attempt-started", "attempt-ended", "failure", "waiting")
        return is_of_driver and any(begin < _time(event) <= end for begin, end in spans)

    return [event for event in events if event["event"] != "adopted" and not is_within(event)]


def _cuts(event: Record, ended: Mapping[int, Record], starts: Sequence[int]) -> Iterator[_Cut]:
    """Where one event cuts the time.

    Args:
        event: of `TIMELINE_EVENTS`.
        ended: the generation-ended event of each generation that has one.
        starts: when attempts and generations started, ascending.
    """
    time = _time(event)
    match event["event"]:
        case "attempt-started":
            yield _PartBegins(time, Part.STARTUP, is_new_attempt=True)
        case "waiting" | "failure":
            yield _PartBegins(time, Part.WAITING)
        case "stopped" | "finished":
            yield _PartBegins(time, Part.STOPPED)
        case "attempt-ended":
            last_sign = event.get("lastSeen")
            is_final = event["exitCode"] in _FINAL_EXIT_CODES
            yield _PartBegins(
                time if last_sign is None else min(time, _milliseconds(last_sign)),
                Part.STOPPED if is_final else Part.WAITING,
            )
        case "generation-started":
            yield _PartBegins(time - _milliseconds(event.get("planSeconds", 0.0)), Part.STARTUP)
            generation = event["generation"]
            rolled_back = _milliseconds(event.get("secondsLost", 0.0))
            run = _run(time, ended[generation], starts) if generation in ended else None
            yield _GenerationStarts(time, generation, rolled_back, run)


def _run(started: int, ended: Record, starts: Sequence[int]) -> _Run:
    """The interval of a generation that has ended, by its generation-ended event."""
    end = started + _milliseconds(ended["seconds"])
    # Workers may outlive a lost head. From the next start on, the time is their successors'.
    next_start = next((start for start in starts if start > started), end)
    return _Run(min(end, next_start), ended.get("parts", {}))


def generation_parts(
    progress: Record | None, started: float, seconds: float, steps_seconds: float, *, failed: bool
) -> dict[str, float]:
    """Seconds by part of a generation that has ended; they sum to `seconds`.

    Args:
        progress: its `progress.json`; None if its workers never began.
        started: when it was started, in seconds since the epoch.
        seconds: from its start to its end.
        steps_seconds: productive seconds of the steps that it logged.
        failed: whether it ended by a failure. The time after its last logged step is lost then.
    """
    measured = measured_parts(progress, started) if progress else {}
    if failed and progress:
        unfinished_step = measured.get(Part.PRODUCTIVE, 0.0) - steps_seconds
        measured |= {Part.PRODUCTIVE: steps_seconds, Part.LOST: max(0.0, unfinished_step)}
    unmeasured = Part.LOST if failed and progress else Part.STARTUP
    divided = _divide(_milliseconds(seconds), measured, unmeasured)
    return {str(part): divided[part] / 1000 for part in Part if divided[part]}


def measured_parts(progress: Record, started: float) -> dict[str, float]:
    """Seconds by part since a generation was started, as rank 0 measured them, plus the start of its process.

    Args:
        progress: its `progress.json`.
        started: when the generation was started, in seconds since the epoch.
    """
    measured = dict(progress.get("seconds", {}))
    measured[Part.STARTUP] = measured.get(Part.STARTUP, 0.0) + max(0.0, progress["startedAt"] - started)
    return measured


def _divide(length: int, measured: Mapping[str, float], unmeasured: Part) -> Counter[Part]:
    """Divide an interval into parts that sum to its length.

    If the measured parts exceed the length, productive is the first to be cut. If they fall short of it, the remainder
    counts as `unmeasured`.

    Args:
        length: of the interval, in milliseconds.
        measured: seconds by part.
        unmeasured: the part of the time that `measured` does not cover.
    """
    divided: Counter[Part] = Counter()
    remainder = length
    for part in reversed(Part):
        divided[part] = min(remainder, max(0, _milliseconds(measured.get(part, 0.0))))
        remainder -= divided[part]
    divided[unmeasured] += remainder
    return divided


def _time(event: Record) -> int:
    """When an event happened, in milliseconds since the epoch."""
    return _milliseconds(event["time"])


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
