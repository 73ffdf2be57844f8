"""Delta debugging finds the few faults that fail together, with few runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.cluster.chaos.reduction import reduced

FAULTS = list(range(40))


def failing(*needed: int) -> Callable[[Sequence[int]], bool]:
    """A cluster that fails if all of these faults are injected."""
    return lambda faults: set(needed) <= set(faults)


@pytest.mark.parametrize("needed", [(0,), (39,), (17,), (3, 4), (0, 39), (5, 20, 33), (1, 9, 21, 38)])
def test_faults_that_are_needed_stay_alone_and_in_order(needed: tuple[int, ...]) -> None:
    assert reduced(FAULTS, failing(*needed)) == list(needed)


def test_two_faults_are_found_by_halves() -> None:
    runs: list[int] = []

    def fails(faults: Sequence[int]) -> bool:
        runs.append(len(faults))
        return {11, 29} <= set(faults)

    assert reduced(FAULTS, fails) == [11, 29]
    assert len(runs) <= 14


def test_schedule_that_fails_only_as_a_whole_stays() -> None:
    assert reduced(FAULTS[:5], lambda faults: len(faults) == 5) == FAULTS[:5]


def test_failure_that_comes_by_chance_is_tried_again() -> None:
    """Every first run of a list passes."""
    seen: set[tuple[int, ...]] = set()

    def fails(faults: Sequence[int]) -> bool:
        again = tuple(faults) in seen
        seen.add(tuple(faults))
        return again and 12 in faults

    assert reduced(FAULTS, fails, attempts=2) == [12]


def test_number_of_runs_is_limited() -> None:
    runs: list[int] = []

    def fails(faults: Sequence[int]) -> bool:
        runs.append(len(faults))
        return {5, 20, 33} <= set(faults)

    short = reduced(FAULTS, fails, limit=9)
    assert len(runs) == 9
    assert {5, 20, 33} <= set(short)
    assert len(short) < len(FAULTS)
