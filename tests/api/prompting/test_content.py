"""Content of messages as lists of text parts: which form a chat template gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from spotune.prompting.content import reads_parts, render_content

Messages = list[dict[str, Any]]

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
MESSAGES: Messages = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "c"}]


def text_only(messages: Messages) -> str:
    return "".join("<" + message["content"] + ">" for message in messages)


def parts_only(messages: Messages) -> str:
    return "".join("<" + part["text"] + ">" for message in messages for part in message["content"])


def both(messages: Messages) -> str:
    contents = [message["content"] for message in messages]
    return "".join(f"<{c}>" if isinstance(c, str) else "".join(f"<{part['text']}>" for part in c) for c in contents)


def as_python(messages: Messages) -> str:
    return "".join(f"<{message['content']}>" for message in messages)


def as_json(messages: Messages) -> str:
    contents = (message["content"] for message in messages)
    return "".join(content if isinstance(content, str) else json.dumps(content) for content in contents)


def first_part(messages: Messages) -> str:
    contents = (message["content"] for message in messages)
    return "".join(content if isinstance(content, str) else content[0]["text"] for content in contents)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (both, "<a><b><c>"),
        (parts_only, "<a><b><c>"),
        (text_only, "<a\nb><c>"),
        (as_python, "<a\nb><c>"),
        (as_json, "a\nbc"),
        (first_part, "a\nbc"),
    ],
)
def test_parts_are_left_to_a_template_that_reads_them_and_joined_for_others(
    template: Callable[[Messages], str], expected: str
) -> None:
    assert render_content(template, MESSAGES, (TypeError,)) == expected


def test_text_is_one_part_for_a_template_that_reads_only_parts() -> None:
    assert render_content(parts_only, [{"role": "user", "content": "a"}], (TypeError,)) == "<a>"


def test_the_error_is_that_of_content_as_text() -> None:
    def refuse(messages: Messages) -> str:
        raise ValueError(f"{messages[0]['content']!r} is refused")

    with pytest.raises(ValueError, match=r"'a\\nb' is refused"):
        render_content(refuse, MESSAGES, (ValueError,))


def test_empty_and_missing_content_is_read() -> None:
    assert reads_parts("", [{"role": "assistant"}, {"content": None}, {"content": []}, {"content": ""}])
