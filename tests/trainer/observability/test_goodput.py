"""Every moment of a job counts as one part, whatever the ledger holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune.goodput import Part
from spotune_trainer.observability.goodput import (
    TIMELINE_EVENTS,
    SecondsByPart,
    generation_parts,
    measured_parts,
    time_breakdown,
)

BEGAN = 1_000_000.0
"""When the first attempt started, in seconds since the epoch."""

Record = dict[str, Any]


def event(at: float, name: str, **values: Any) -> Record:
    return {"time": BEGAN + at, "event": name, **values}


def attempt(at: float) -> Record:
    return event(at, "attempt-started", attempt=1)


def started(at: float, generation: int, **values: Any) -> Record:
    return event(at, "generation-started", generation=generation, **values)


def ended(at: float, generation: int, seconds: float, **parts: float) -> Record:
    return event(at, "generation-ended", generation=generation, seconds=seconds, parts=parts)


def spent(records: list[Record], now: float, measured: dict[str, float] | None = None) -> dict[str, float]:
    """SecondsByPart by part until `now`, without parts that took no time."""
    seconds = time_breakdown(records).seconds(BEGAN + now, measured, Part.PRODUCTIVE)
    return {str(part): value for part, value in seconds.items() if value}


def total(seconds: SecondsByPart) -> int:
    """Milliseconds of all parts."""
    return sum(round(value * 1000) for value in seconds.values())


def test_a_run_without_failures() -> None:
    records = [
        attempt(0),
        started(5, 1, planSeconds=1.0),
        ended(105, 1, 100, startup=10, productive=80, dataWait=2, checkpointStall=3, evaluation=5),
        event(106, "finished"),
    ]
    expected = {"startup": 16.0, "productive": 80.0, "dataWait": 2.0, "checkpointStall": 3.0, "evaluation": 5.0}
    assert spent(records, 106) == expected
    assert spent(records, 500) == {**expected, "stopped": 394.0}


def test_rolled_back_steps_are_lost_work() -> None:
    records = [
        attempt(0),
        started(5, 1),
        ended(65, 1, 60, startup=10, productive=45, lost=5),
        event(65, "failure", cause="workerLost"),
        started(75, 2, secondsLost=15.0, planSeconds=2.0),
    ]
    expected = {"startup": 17.0, "productive": 30.0, "lost": 20.0, "waiting": 8.0}
    assert spent(records, 75) == expected
    assert spent(records, 105, {"startup": 20.0, "productive": 6.0}) == {
        **expected,
        "startup": 37.0,
        "productive": 40.0,
    }


def test_waiting_for_workers_begins_with_the_waiting_event() -> None:
    records = [attempt(0), event(4, "waiting", slots=0, wanted=2), started(64, 1, planSeconds=1.5)]
    assert spent(records, 70) == {"startup": 5.5, "waiting": 58.5, "productive": 6.0}


def test_a_lost_head_counts_as_waiting_from_its_last_sign_of_life() -> None:
    """Its driver wrote last at 60 s, its workers at 63 s; the next driver records their ends."""
    records = [
        attempt(0),
        started(5, 1),
        event(95, "attempt-ended", exitCode=None, lastSeen=BEGAN + 60),
        event(95, "failure", cause="headLost"),
        attempt(96),
        ended(98, 1, 58, startup=10, productive=48),
        started(100, 2, secondsLost=20.0),
    ]
    assert spent(records, 100) == {"startup": 19.0, "productive": 28.0, "lost": 20.0, "waiting": 33.0}


def test_a_head_lost_before_its_workers_wrote_anything() -> None:
    records = [
        attempt(0),
        started(5, 1),
        event(95, "attempt-ended", exitCode=None, lastSeen=BEGAN + 20),
        attempt(96),
        ended(98, 1, 0),
    ]
    assert spent(records, 98) == {"startup": 22.0, "waiting": 76.0}


def test_a_generation_that_was_adopted_by_the_next_driver_has_run_through() -> None:
    """What was recorded of the lost driver and its successor's start takes nothing from it."""
    records = [
        attempt(0),
        started(5, 1),
        event(40, "attempt-ended", exitCode=None, lastSeen=BEGAN + 20),
        event(40, "failure", cause="headLost"),
        attempt(41),
    ]
    measured = {"startup": 5.0, "productive": 40.0}
    assert spent(records, 50, measured) == {"startup": 29.0, "waiting": 21.0}
    records.append(event(50, "adopted", generation=1))
    assert spent(records, 50, measured) == {"startup": 10.0, "productive": 40.0}
    records.append(ended(105, 1, 100, startup=5, productive=95))
    assert spent(records, 105) == {"startup": 10.0, "productive": 95.0}


def test_workers_that_outlive_their_head_get_no_time_of_their_successors() -> None:
    records = [
        attempt(0),
        started(5, 1),
        event(30, "attempt-ended", exitCode=None, lastSeen=BEGAN + 20),
        attempt(31),
        ended(33, 1, 500, startup=5, productive=495),
        started(35, 2),
    ]
    assert spent(records, 35) == {"startup": 14.0, "productive": 21.0}


@pytest.mark.parametrize("final", [event(20, "stopped"), event(20, "attempt-ended", exitCode=20)])
def test_a_stopped_job_stays_stopped_until_its_next_attempt(final: Record) -> None:
    late = event(9_000, "failure", cause="headLost")
    records = [attempt(0), final, late, attempt(10_000)]
    assert spent(records, 10_007) == {"startup": 27.0, "stopped": 9_980.0}


def test_pauses_between_attempts_that_failed_are_waiting() -> None:
    records = [attempt(0), event(20, "attempt-ended", exitCode=10), attempt(50)]
    assert spent(records, 50) == {"startup": 20.0, "waiting": 30.0}


def test_before_the_first_attempt_no_time_counts() -> None:
    assert spent([], 100) == {}
    assert spent([event(0, "committed", step=3)], 100) == {}


def test_parts_of_a_generation_that_failed() -> None:
    """Steps took 50 s, of which 45 s are logged: 5 s went into an unfinished step. The loss was noticed 3 s later."""
    progress = {"startedAt": BEGAN + 4, "seconds": {"startup": 6.0, "restore": 2.0, "productive": 50.0}}
    found = generation_parts(progress, BEGAN, 65.0, steps_seconds=45.0, failed=True)
    assert found == {"startup": 10.0, "restore": 2.0, "productive": 45.0, "lost": 8.0}


def test_parts_of_a_generation_that_ended_without_failure() -> None:
    progress = {"startedAt": BEGAN + 4, "seconds": {"startup": 6.0, "productive": 50.0, "evaluation": 2.0}}
    found = generation_parts(progress, BEGAN, 65.0, steps_seconds=49.999, failed=False)
    assert found == {"startup": 13.0, "productive": 50.0, "evaluation": 2.0}


def test_a_generation_whose_workers_never_began_is_startup() -> None:
    assert generation_parts(None, BEGAN, 61.0, steps_seconds=0.0, failed=True) == {"startup": 61.0}


times = st.floats(0, 1e7)
parts = st.dictionaries(st.sampled_from([str(part) for part in Part]), st.floats(-1, 1e6))
records = st.fixed_dictionaries(
    {"time": times, "event": st.sampled_from(sorted(TIMELINE_EVENTS))},
    optional={
        "generation": st.integers(1, 4),
        "exitCode": st.sampled_from([None, 0, 10, 20]),
        "lastSeen": times,
        "seconds": st.floats(0, 1e6),
        "secondsLost": st.floats(0, 1e6),
        "planSeconds": st.floats(0, 100),
        "parts": parts,
    },
).map(lambda record: {"generation": 1, "exitCode": None, "seconds": 1.0, **record})


@given(st.lists(records, max_size=20), times, parts, st.sampled_from(Part))
def test_the_parts_sum_to_the_wall_clock_whatever_the_ledger_holds(
    history: list[Record], now: float, measured: dict[str, float], current_part: Part
) -> None:
    found = time_breakdown(history)
    seconds = found.seconds(now, measured, current_part)
    assert all(value >= 0 for value in seconds.values())
    if found.open_since is None:
        assert total(seconds) == 0
        return
    begins = [record["time"] - record.get("planSeconds", 0.0) for record in history]
    begins += [min(record["lastSeen"], record["time"]) for record in history if "lastSeen" in record]
    until = max(found.open_since, round(now * 1000))
    assert min(round(begin * 1000) for begin in begins) - 1 <= until - total(seconds) <= found.open_since


@given(st.lists(records, min_size=1, max_size=20), times, times)
def test_passing_time_adds_to_one_part_and_changes_no_other(history: list[Record], one: float, other: float) -> None:
    found = time_breakdown(history)
    if found.open_since is None:
        return
    earlier, later = sorted((one, other))
    before, after = found.seconds(earlier), found.seconds(later)
    passed = max(found.open_since, round(later * 1000)) - max(found.open_since, round(earlier * 1000))
    assert total(after) - total(before) == passed
    assert sum(before[part] != after[part] for part in Part) <= 1


@given(
    st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 100), parts, st.booleans(), st.one_of(st.none(), st.just(True))
)
def test_the_parts_of_a_generation_sum_to_its_time(
    seconds: float, steps_seconds: float, before: float, measured: dict[str, float], failed: bool, began: bool | None
) -> None:
    progress = {"startedAt": BEGAN + before, "seconds": measured} if began else None
    found = generation_parts(progress, BEGAN, seconds, steps_seconds, failed=failed)
    assert sum(round(value * 1000) for value in found.values()) == round(seconds * 1000)
    assert min(found.values(), default=0) >= 0


def test_measured_startup_includes_the_start_of_the_process() -> None:
    progress = {"startedAt": BEGAN + 4.5, "seconds": {"restore": 2.0}}
    assert measured_parts(progress, BEGAN) == {"restore": 2.0, "startup": 4.5}
    early = measured_parts({**progress, "startedAt": BEGAN - 1}, BEGAN)
    assert math.isclose(early["startup"], 0.0), "the clocks of two hosts differ"
