"""Reads and checks the chat messages of a row.

Messages have the format of OpenAI and transformers: ``role``, ``content`` (text, null, or a list of text parts) and
``tool_calls``. Two flags choose what is trained on: ``train`` (true or false) or ``weight`` (1 or 0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spotune.prompting.content import CONTENT_FORMS, simple_content, with_content
from spotune.prompting.template import RowError

Message = dict[str, Any]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which datasets keep the reasoning before an answer. transformers gives templates each as all three."""


SHAREGPT_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
}
"""Roles by the names that ShareGPT has in ``from``."""


@dataclass(frozen=True)
class Chat:
    """The chat of a row.

    Attributes:
        messages: In the format of transformers, without flags. Content is text, null or a list of several text parts,
            and arguments of tool calls are objects where they are valid JSON.
        trained: For each message its ``train`` or ``weight`` flag; None without one.
        tools: JSON schemas of the functions that the model may call.
    """

    messages: tuple[Message, ...]
    trained: tuple[bool | None, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]


def read_chat(row: Mapping[str, Any], column: str, tools_column: str = "") -> Chat:
    """The chat in ``column``, with the tools in ``tools_column``. Messages may have ShareGPT's form: from and value.

    Raises:
        RowError: A column is missing or malformed, or no message is the assistant's.
    """
    values = [_from_sharegpt(value, column) for value in _read_list(row, column, "messages")]
    if not values:
        raise RowError(f"column {column!r} is an empty list of messages")
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("role"), str) or not _has_text(value):
            raise RowError(f"a message in column {column!r} lacks text in 'role' or 'content': {value!r:.100}")
    numbered = [(f"message {number} in column {column!r}", value) for number, value in enumerate(values, start=1)]
    chat = Chat(
        messages=tuple(_read_message(value, place) for place, value in numbered),
        trained=tuple(_read_flag(value, place) for place, value in numbered),
        tools=tuple(read_tools(row, tools_column)) if tools_column else (),
    )
    if not chat.assistant_turns:
        raise RowError(f"column {column!r} has no message of the role 'assistant' to learn from")
    return chat


def message_variants(messages: Sequence[Message]) -> Iterator[tuple[Message, ...]]:
    """The same messages in the forms that templates expect, most common form first.

    Templates disagree about a message without content beside tool calls (no content, or ''), about arguments of tool
    calls (objects or JSON text), and about content (text or a list of parts).
    """
    variants: list[tuple[Message, ...]] = []
    for form in CONTENT_FORMS:
        for text_arguments, no_content in ((False, True), (False, False), (True, True), (True, False)):
            base = [_variant(message, text_arguments, no_content) for message in messages]
            variant = with_content(base, form)
            if variant not in variants:
                variants.append(variant)
                yield variant


def _variant(message: Message, text_arguments: bool, no_content: bool) -> Message:
    changed = {name: value for name, value in message.items() if value is not None}
    if not no_content:
        changed.setdefault("content", "")
    if text_arguments and "tool_calls" in changed:
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_json(call["function"]["arguments"])}}
            for call in changed["tool_calls"]
        ]
    return changed


def has_content(message: Message) -> bool:
    """Whether a message has text, reasoning or tool calls."""
    texts = [content_text(message), *(message.get(name) or "" for name in REASONING_FIELDS)]
    return bool(message.get("tool_calls")) or any(text.strip() for text in texts)


def message_text(message: Message) -> str:
    """What the row says in a message: its content, reasoning and tool calls, without what a template adds."""
    content = message.get("content")
    parts = [part["text"] for part in content] if isinstance(content, list) else [content]
    texts = [*parts, *(message.get(name) for name in REASONING_FIELDS)]
    calls = [_as_json(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join([*filter(None, texts), *calls])


def content_text(message: Message) -> str:
    """The content of a message, with its parts one after the other; empty if it has none."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def has_text_of(message: Message, text: str) -> bool:
    """Whether ``text`` has the whole content of a message, or each of its parts."""
    content = message.get("content")
    if isinstance(content, list) and all(part["text"].strip() in text for part in content):
        return True
    return content_text(message).strip() in text


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_list(row: Mapping[str, Any], column: str, of: str) -> list[Any]:
    if column not in row:
        raise RowError(f"no column {column!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    value = row[column]
    if isinstance(value, str):  # a CSV column holds the list as JSON text
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError(f"column {column!r} is text but not a JSON list of {of}: {error}") from error
    if not isinstance(value, list):
        raise RowError(f"column {column!r} is not a list of {of}")
    return value


def read_tools(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """The tools in ``column``; none if it is empty or null.

    Raises:
        RowError: The column is missing or malformed.
    """
    if column in row and (row[column] is None or row[column] == ""):
        return []
    tools = _read_list(row, column, "tools")
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(tool.get("function", tool), dict):
            raise RowError(f"a tool in column {column!r} is not an object with the function's schema: {tool!r:.100}")
    return tools


def _from_sharegpt(message: Any, column: str) -> Any:
    """A message of ShareGPT's form with role and content; other values as they are.

    Raises:
        RowError: ``from`` is none of the roles of `SHAREGPT_ROLES`.
    """
    if not isinstance(message, dict) or message.get("role") is not None or not {"from", "value"} <= message.keys():
        return message
    role = SHAREGPT_ROLES.get(str(message["from"]))
    if role is None:
        raise RowError(
            f"a message in column {column!r} has the form of ShareGPT, and 'from' is {message['from']!r}, not "
            f"{', '.join(SHAREGPT_ROLES)}: give messages role and content"
        )
    others = {name: value for name, value in message.items() if name not in ("from", "value", "role", "content")}
    return {"role": role, "content": message["value"], **others}


def _has_text(message: Mapping[str, Any]) -> bool:
    """Whether a message says anything. Null content needs tool calls or reasoning instead."""
    if isinstance(message.get("content"), str | list):
        return True
    return bool(message.get("tool_calls")) or any(message.get(name) for name in REASONING_FIELDS)


def _read_message(value: Mapping[str, Any], place: str) -> Message:
    # Parquet gives every message the fields of all others, with null.
    message = {name: field for name, field in value.items() if field is not None and name not in ("train", "weight")}
    message["content"] = _read_content(value.get("content"), place)
    for name in REASONING_FIELDS:
        if name in message and not isinstance(message[name], str):
            raise RowError(f"{place}: {name!r} is not text")
    calls = message.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise RowError(f"{place}: 'tool_calls' is not a list")
        message["tool_calls"] = [_read_call(call, place) for call in calls]
    return message


def _read_content(content: Any, place: str) -> Any:
    if content is None or isinstance(content, str):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError(f"{place}: a content part of type {kind!r}; only parts of type 'text' can be learned from")
    return simple_content([{"type": "text", "text": part["text"]} for part in content]) or ""


def _read_call(call: Any, place: str) -> dict[str, Any]:
    call = {name: value for name, value in call.items() if value is not None} if isinstance(call, dict) else {}
    if "function" not in call and "name" in call:  # a flat call, without the level of 'function'
        call = {"type": "function", "function": call}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"{place}: a tool call lacks 'function' with its 'name': {call!r:.100}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _read_flag(message: Mapping[str, Any], place: str) -> bool | None:
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise RowError(f"{place}: 'train' is {train!r}; write true or false")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise RowError(f"{place}: 'weight' is {weight!r}; only 0 (leave out) and 1 (train on) are supported")
    flags = {bool(flag) for flag in (train, weight) if flag is not None}
    if len(flags) > 1:
        raise RowError(f"{place}: 'train' and 'weight' contradict each other")
    if flags == {True} and message["role"] != "assistant":
        raise RowError(
            f"{place} has the role {message['role']!r} and is marked to be trained on; only assistant messages can be, "
            "unless dataset.trainOn is all"
        )
    return flags.pop() if flags else None
