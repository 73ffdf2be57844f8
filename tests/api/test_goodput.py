"""Goodput: productive time over all time except stopped time."""

import pytest

from spotune.goodput import Part, goodput


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({Part.PRODUCTIVE: 60.0, Part.LOST: 20.0, Part.STARTUP: 20.0}, 0.6),
        ({Part.PRODUCTIVE: 60.0, Part.WAITING: 60.0, Part.STOPPED: 10_000.0}, 0.5),
        ({Part.PRODUCTIVE: 60.0, Part.EVALUATION: 40.0}, 0.6),
        ({Part.STARTUP: 5.0}, 0.0),
        ({Part.STOPPED: 5.0}, None),
        ({}, None),
    ],
)
def test_goodput_is_productive_time_over_wall_clock(seconds: dict[Part, float], expected: float | None) -> None:
    assert goodput(seconds) == expected
