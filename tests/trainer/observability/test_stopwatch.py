"""What a worker's time is spent on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotune.goodput import Part
from spotune_trainer.observability.stopwatch import Stopwatch


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 7.0

    def __call__(self) -> float:
        return self.now

    def items(self, count: int, seconds: float) -> Iterator[int]:
        """Items that take their time to come."""
        for number in range(count):
            self.now += seconds
            yield number


def test_time_within_a_part_is_not_that_of_the_part_around_it() -> None:
    clock = Clock()
    spent = Stopwatch(clock)
    clock.now += 2
    with spent.on(Part.PRODUCTIVE):
        clock.now += 10
        with spent.on(Part.CHECKPOINT_STALL):
            clock.now += 1
        clock.now += 5
    clock.now += 0.5
    assert spent.seconds() == {Part.STARTUP: 2.5, Part.PRODUCTIVE: 15.0, Part.CHECKPOINT_STALL: 1.0}


def test_the_part_that_goes_on_counts_and_an_error_ends_it() -> None:
    clock = Clock()
    spent = Stopwatch(clock)

    def read() -> None:
        with spent.on(Part.RESTORE):
            clock.now += 3
            assert spent.seconds() == {Part.RESTORE: 3.0}
            raise OSError("away")

    with pytest.raises(OSError, match="away"):
        read()
    assert spent.part is Part.STARTUP


def test_waiting_for_items_is_not_working_on_them() -> None:
    clock = Clock()
    spent = Stopwatch(clock)
    laps = []
    with spent.on(Part.PRODUCTIVE):
        for number in spent.each(Part.DATA_WAIT, clock.items(3, seconds=0.25)):
            clock.now += 1 + number
            laps.append(spent.lap())
    assert laps == [1, 2, 3]
    assert spent.seconds() == {Part.PRODUCTIVE: 6.0, Part.DATA_WAIT: 0.75}
