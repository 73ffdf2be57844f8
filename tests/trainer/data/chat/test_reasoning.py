"""Reasoning within the content of a message."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune_trainer.data.chat.messages import read_chat
from spotune_trainer.data.chat.reasoning import split_reasoning
from spotune_trainer.data.chat.renderer import ChatRenderer
from tests.trainer.data.chat.support.conversations import assistant, user
from tests.trainer.data.chat.support.reference import REFERENCES

OPENING = ["<think>", "<thinking>", "<seed:think>", "[THINK]", "<|channel>thought"]
CLOSING = ["</think>", "</thinking>", "</seed:think>", "[/THINK]", "<channel|>"]
_EXPRESSION = re.compile(
    f"(?:{'|'.join(map(re.escape, OPENING))})?(.*?)(?:{'|'.join(map(re.escape, CLOSING))})", re.DOTALL
)
"""The same as one regular expression, whose time grows with the square of the text after the last closing tag."""
_PIECES = st.sampled_from([*OPENING, *CLOSING, "<", "[", "think>", "</", "a", "\n", " ", "thought"])


@given(st.lists(_PIECES, max_size=12).map("".join))
def test_reasoning_is_what_one_regular_expression_finds(content: str) -> None:
    assert split_reasoning(content) == (_EXPRESSION.findall(content), _EXPRESSION.sub("", content))


@pytest.mark.parametrize(
    ("content", "reasoning", "answer"),
    [
        ("<think>x</think>A", ["x"], "A"),
        ("x</think>A", ["x"], "A"),
        ("<think>x", [], "<think>x"),
        ("[THINK]x[/THINK][THINK]y[/THINK]A", ["x", "y"], "A"),
        ("A", [], "A"),
    ],
)
def test_reasoning_ends_with_a_closing_tag(content: str, reasoning: list[str], answer: str) -> None:
    assert split_reasoning(content) == (reasoning, answer)


@pytest.mark.parametrize(
    "answer",
    ["<think>x</think>" + "word " * 40_000 + "end", "<think>" * 30_000 + "A", "A" + " " * 200_000 + "B"],
    ids=["after reasoning", "never closed", "spaces"],
)
def test_a_turn_of_200_000_characters_is_rendered(answer: str) -> None:
    """Time that grows with the square of the length would be minutes."""
    messages = [user("1?"), assistant(answer), user("2?"), assistant(answer)]
    chat = ChatRenderer(REFERENCES["trl/qwen3"].tokenizer).render(read_chat({"chat": messages}, "chat"))
    assert set(chat.outcomes.values()) == {"trained"}
