"""Measuring where a worker's time goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotune.goodput import Part
from spotune_trainer.observability.stopwatch import Stopwatch


class Clock:
    """Seconds that a test advances by hand."""

    def __init__(self) -> None:
        self.now = 7.0

    def __call__(self) -> float:
        return self.now

    def items(self, count: int, seconds: float) -> Iterator[int]:
        """Items that each take some seconds to arrive."""
        for number in range(count):
            self.now += seconds
            yield number


def test_time_of_an_inner_part_does_not_count_for_the_outer_one() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    clock.now += 2
    with stopwatch.measure(Part.PRODUCTIVE):
        clock.now += 10
        with stopwatch.measure(Part.CHECKPOINT_STALL):
            clock.now += 1
        clock.now += 5
    clock.now += 0.5
    assert stopwatch.seconds() == {Part.STARTUP: 2.5, Part.PRODUCTIVE: 15.0, Part.CHECKPOINT_STALL: 1.0}


def test_the_current_part_counts_and_an_error_ends_it() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)

    def read() -> None:
        with stopwatch.measure(Part.RESTORE):
            clock.now += 3
            assert stopwatch.seconds() == {Part.RESTORE: 3.0}
            raise OSError("away")

    with pytest.raises(OSError, match="away"):
        read()
    assert stopwatch.part is Part.STARTUP


def test_waiting_for_items_counts_apart_from_working_on_them() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    laps = []
    with stopwatch.measure(Part.PRODUCTIVE):
        for number in stopwatch.measure_each(Part.DATA_WAIT, clock.items(3, seconds=0.25)):
            clock.now += 1 + number
            laps.append((stopwatch.lap(Part.PRODUCTIVE), stopwatch.lap(Part.DATA_WAIT)))
    assert laps == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert stopwatch.seconds() == {Part.PRODUCTIVE: 6.0, Part.DATA_WAIT: 0.75}
