"""Deadlines in job files."""

import pytest
from pydantic import TypeAdapter

from spotune.units.deadlines import Deadline

CREATED = 1_000_000.0


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("36h", CREATED + 36 * 3600),
        ("1d12h", CREATED + 36 * 3600),
        ("1970-01-12T13:46:40Z", 1_000_000.0),
        ("1970-01-12T14:46:40.500+01:00", 1_000_000.5),
    ],
)
def test_deadline_is_a_time_or_a_duration_from_the_creation(text: str, at: float) -> None:
    assert Deadline(text).at(CREATED) == at
    assert TypeAdapter(Deadline).validate_python(text) == text


@pytest.mark.parametrize(
    "text", ["", "36", "tomorrow", "2027-01-31", "2027-01-31T18:00:00", "2027-02-30T18:00:00Z", "2027-01-31 18:00:00Z"]
)
def test_other_texts_are_rejected_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="expected a time with its offset such as 2027-01-31T18:00:00Z, or a duration"):
        TypeAdapter(Deadline).validate_python(text)
    with pytest.raises(ValueError):  # noqa: PT011 - the standard library names the part of the time
        Deadline(text)


def test_deadline_in_the_past_is_a_problem_with_a_remedy() -> None:
    assert Deadline("1970-01-12T13:46:41Z").problem(CREATED) == ""
    assert Deadline("1970-01-12T13:46:40Z").problem(CREATED).startswith("1970-01-12T13:46:40Z is in the past: give a")
    assert Deadline("0s").problem(CREATED) == "0s leaves no time: give a duration longer than 0s"
