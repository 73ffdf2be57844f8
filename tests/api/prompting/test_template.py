"""Prompt templates: columns, literal braces, and what is refused."""

from typing import Any

import pytest

from spotune.errors import UsageError
from spotune.prompting.template import RowError, Template, fill_fields


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{a}: {b c}", "x: 3"),
        ("{{{a}}}", "{x}"),
        ("plain", "plain"),
        ("{flag} {ratio}", "true 0.5"),
    ],
)
def test_templates_fill_in_columns(template: str, text: str) -> None:
    assert Template(template).render({"a": "x", "b c": 3, "flag": True, "ratio": 0.5}) == text


@pytest.mark.parametrize("template", ["{a", "a}", "{a}}", "{}"])
def test_a_brace_without_counterpart_is_rejected(template: str) -> None:
    with pytest.raises(ValueError, match="lone"):
        Template(template)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"b": 1}, "no column 'a'; the row has 'b'"),
        ({"a": None}, "null"),
        ({"a": ["x"]}, "a list"),
        ({"a": b"x"}, "bytes"),
    ],
)
def test_error_names_a_column_that_is_not_text(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        Template("{a}").render(row)


def test_the_question_fills_the_one_missing_field() -> None:
    assert fill_fields(["question"], "{question}", "how?", {}) == {"question": "how?"}
    assert fill_fields(["a", "b"], "{a}{b}", "how?", {"a": 1}) == {"a": 1, "b": "how?"}
    with pytest.raises(UsageError, match="omit the question"):
        fill_fields([], "fixed", "how?", {})
