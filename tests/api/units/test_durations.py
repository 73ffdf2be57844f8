"""Durations in job files."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from spotune.units.durations import Duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300s", 300), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("500ms", 0.5), ("2d", 172800), ("0s", 0)],
)
def test_units_add_up_to_seconds(text: str, seconds: float) -> None:
    assert Duration(text).seconds == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "5 minutes", "m", "-5m", "5M", "1h 30m", "5m\n"])
def test_invalid_durations_are_rejected_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="such as 30s, 5m, 1h30m"):
        Duration(text)


def test_a_duration_keeps_its_original_text() -> None:
    assert TypeAdapter(Duration).dump_json(Duration("90s")) == b'"90s"'
    assert TypeAdapter(Duration).validate_json('"90s"').seconds == 90


def test_copies_and_pickles_are_durations() -> None:
    duration = Duration("90s")
    assert copy.deepcopy(duration).seconds == pickle.loads(pickle.dumps(duration)).seconds == 90


def test_the_schema_has_a_pattern_for_the_api_server() -> None:
    assert TypeAdapter(Duration).json_schema() == {"type": "string", "pattern": Duration.PATTERN}


@given(st.integers(0, 10**6), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_a_number_and_a_unit_multiply(number: int, unit: str) -> None:
    assert Duration(f"{number}{unit}").seconds == pytest.approx(number * Duration.UNIT_SECONDS[unit])
