"""Which messages are read, and in which form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotune.prompting.template import RowError
from spotune_trainer.data.chat.messages import Chat, message_variants, read_chat
from tests.trainer.data.chat.support.conversations import TOOLS, assistant, user

CALL = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}


def read(*messages: dict[str, Any], **row: Any) -> Chat:
    return read_chat({"chat": list(messages), **row}, "chat", "tools" if "tools" in row else "")


PARTS = [{"type": "text", "text": "How"}, {"type": "text", "text": "many?"}]


def test_text_parts_are_left_to_the_template_and_then_joined_by_line_breaks() -> None:
    as_given, as_parts, joined, one_part = message_variants(
        read({"role": "user", "content": PARTS}, assistant("Ten.")).messages
    )
    assert [message["content"] for message in as_given] == [PARTS, "Ten."]
    assert [message["content"] for message in as_parts] == [PARTS, [{"type": "text", "text": "Ten."}]]
    assert [message["content"] for message in joined] == ["How\nmany?", "Ten."]
    assert one_part[0]["content"] == [{"type": "text", "text": "How\nmany?"}]


@pytest.mark.parametrize(("parts", "content"), [(PARTS[:1], "How"), ([], "")])
def test_one_text_part_is_text(parts: list[dict[str, str]], content: str) -> None:
    assert read({"role": "user", "content": parts}, assistant("Ten.")).messages[0]["content"] == content


def test_fields_that_parquet_fills_with_null_are_left_out() -> None:
    chat = read(user("Hi.") | {"tool_calls": None, "train": None}, assistant(None, tool_calls=[CALL], name=None))
    assert chat.messages == (user("Hi."), {"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert chat.trained == (None, None)


@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
        {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}},
        {"name": "get_weather", "arguments": {"city": "Paris"}},
    ],
)
def test_tool_calls_have_one_form(call: dict[str, Any]) -> None:
    (read_call,) = read(user("Weather?"), assistant(None, tool_calls=[call])).messages[1]["tool_calls"]
    assert read_call["function"] == CALL["function"]


@pytest.mark.parametrize(("arguments", "expected"), [(None, {}), ("", {}), ("not JSON", "not JSON"), ("[1]", "[1]")])
def test_arguments_that_are_no_json_object_stay_text(arguments: str | None, expected: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    assert read(assistant(None, tool_calls=[call])).messages[0]["tool_calls"][0]["function"]["arguments"] == expected


def test_flags_are_read_and_do_not_reach_the_template() -> None:
    chat = read(
        user("Hi.") | {"weight": 0},
        assistant("A", train=False),
        assistant("B", weight=0),
        assistant("C", weight=1, train=True),
        assistant("D"),
    )
    assert chat.trained == (False, False, False, True, None)
    assert all(not {"train", "weight"} & message.keys() for message in chat.messages)


def test_tools_are_read_from_their_column() -> None:
    for tools in (TOOLS, json.dumps(TOOLS)):
        assert read(assistant("Hi."), tools=tools).tools == tuple(TOOLS)


@pytest.mark.parametrize("none", [None, "", []])
def test_a_row_may_have_no_tools(none: Any) -> None:
    assert read(assistant("Hi."), tools=none).tools == ()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user"}, "lacks text in 'role' or 'content'"),
        ({"role": "assistant", "content": None}, "lacks text in 'role' or 'content'"),
        ({"content": "Hi."}, "lacks text in 'role' or 'content'"),
        ({"role": "user", "content": [{"type": "image", "url": "a.png"}]}, "message 1.*content part of type 'image'"),
        ({"role": "user", "content": ["Hi."]}, "message 1.*content part of type 'str'"),
        (assistant("A", train="yes"), "'train' is 'yes'; write true or false"),
        (assistant("A", weight=0.5), "'weight' is 0.5; only 0"),
        (assistant("A", weight=1, train=False), "contradict each other"),
        (user("Hi.") | {"train": True}, "role 'user'.*only assistant messages can be"),
        (assistant(None, tool_calls=["f"]), "a tool call lacks 'function'"),
        (assistant(None, tool_calls="f"), "'tool_calls' is not a list"),
        (assistant("A", reasoning_content=["x"]), "'reasoning_content' is not text"),
    ],
)
def test_malformed_messages_are_rejected(message: dict[str, Any], error: str) -> None:
    with pytest.raises(RowError, match=error):
        read(message, assistant("Ten."))


@pytest.mark.parametrize(
    ("tools", "error"),
    [("{", "not a JSON list of tools"), (["f"], "not an object"), ([{"function": "f"}], "not an object")],
)
def test_malformed_tools_are_rejected(tools: Any, error: str) -> None:
    with pytest.raises(RowError, match=error):
        read(assistant("Hi."), tools=tools)
    with pytest.raises(RowError, match="no column 'tools'"):
        read_chat({"chat": [assistant("Hi.")]}, "chat", "tools")


def test_a_plain_chat_has_one_form_as_text_and_one_as_parts() -> None:
    text, parts = message_variants(read(user("Hi."), assistant("Ten.")).messages)
    assert text == (user("Hi."), assistant("Ten."))
    assert parts[1]["content"] == [{"type": "text", "text": "Ten."}]


def test_a_call_has_forms_with_and_without_content_and_with_arguments_as_text() -> None:
    variants = list(message_variants(read(assistant(None, tool_calls=[CALL])).messages))
    described = [
        (message.get("content"), type(message["tool_calls"][0]["function"]["arguments"]).__name__)
        for (message,) in variants
    ]
    assert described[:4] == [(None, "dict"), ("", "dict"), (None, "str"), ("", "str")]
