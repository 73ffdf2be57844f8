"""Tool calls are found in a text wherever it is divided."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune_serve.protocol.tool_calls import ParsedCall, ToolCallParser

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'
PARSED = ParsedCall("weather", '{"city": "Köln", "days": [1, 2]}')


def parse(pieces: list[str]) -> tuple[str, list[ParsedCall]]:
    parser = ToolCallParser()
    results = [*(parser.push(piece) for piece in pieces), parser.flush()]
    calls = [call for _, found in results for call in found]
    assert parser.num_calls == len(calls)
    return "".join(text for text, _ in results), calls


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_a_divided_text_has_the_same_calls(cuts: list[int]) -> None:
    text = f"a < b <tool {CALL}\n{CALL}"
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:stop] for start, stop in itertools.pairwise(borders)]
    assert parse(pieces) == ("a < b <tool ", [PARSED, PARSED])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no json</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call> after',
        "cut off <tool_call>{",
        "cut off <tool_",
        "",
    ],
)
def test_what_is_no_call_remains_text(text: str) -> None:
    assert parse(list(text)) == (text, [])


def test_the_closing_tag_of_the_last_call_may_be_missing() -> None:
    assert parse([CALL.removesuffix("</tool_call>")]) == ("", [PARSED])


def test_text_between_calls_is_kept_and_space_is_not() -> None:
    assert parse([f"{CALL}\n\n{CALL} and {CALL}\n"]) == (" and ", [PARSED] * 3)


def test_arguments_may_be_json_already_or_missing() -> None:
    call = json.dumps({"name": "f", "arguments": '{"x": 1}'})
    assert parse([f"<tool_call>{call}</tool_call>"])[1] == [ParsedCall("f", '{"x": 1}')]
    assert parse(['<tool_call>{"name": "f"}</tool_call>'])[1] == [ParsedCall("f", "{}")]
