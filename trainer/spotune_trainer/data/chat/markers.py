"""Finds each message in a rendered chat.

A marker, a character that no text has, is put into every field of every message. The position of the marker in the
rendered chat is the position of the field. A marker at the end of a text survives what templates do: strip, split at
``</think>``, and ``tojson``. Without the markers the text has to be the same as without marking; so markers that change
what a template does are noticed, and left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from spotune.prompting.template import RowError
from spotune_trainer.data.chat.messages import REASONING_FIELDS, Message

_FIRST, _LAST = 0xF0000, 0xFFFFD  # Supplementary Private Use Area-A of Unicode
_MARKER = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
# Templates look at tags at the end of a text (`content.endswith('</tool_response>')`), so the marker goes before one.
_LAST_TAG = re.compile(r"</(?!think)[\w:.-]+>\Z")
_LAST_WORD = re.compile(r"\w(?=\W*\Z)")

FieldKind = Literal["content", "reasoning", "name", "arguments"]


@dataclass(frozen=True)
class Field:
    """A field of a message that a template can render.

    Attributes:
        message: Index of the message.
        kind: Which field; name and arguments are those of a tool call.
        call: Index of the tool call.
    """

    message: int
    kind: FieldKind
    call: int = 0


class MarkedMessages:
    """Messages with a marker in each field.

    Args:
        messages: In the format of transformers.
        unmarked: Indices of messages that get no marker.

    Attributes:
        messages: The messages with markers.
        fields: The marker of each field. Fields without visible text have none.

    Raises:
        RowError: The messages are too many, or contain characters that serve as markers.
    """

    def __init__(self, messages: Sequence[Message], unmarked: Set[int] = frozenset()) -> None:
        self.fields: dict[Field, str] = {}
        self._fields_of: dict[str, Field] = {}
        self.messages = [
            message if index in unmarked else self._put_into_message(index, message)
            for index, message in enumerate(messages)
        ]

    def locate(self, rendered: str) -> Located:
        """Where the fields lie in ``rendered``, the rendered text of these messages or of the first of them."""
        positions: dict[Field, list[int]] = {}
        pieces: list[str] = []
        length, copied = 0, 0
        for match in _MARKER.finditer(rendered):
            pieces.append(rendered[copied : match.start()])
            length += match.start() - copied
            copied = match.end()
            if field := self._fields_of.get(match.group()):
                positions.setdefault(field, []).append(length)
        return Located("".join([*pieces, rendered[copied:]]), positions)

    def _put_into_message(self, index: int, message: Message) -> Message:
        marked = dict(message)
        content = message.get("content")
        if isinstance(content, list):  # of text parts: see messages.message_variants
            marked["content"] = [
                {**part, "text": self._insert_last(part["text"], Field(index, "content"))} for part in content
            ]
        elif content:
            marked["content"] = self._insert_last(content, Field(index, "content"))
        for name in REASONING_FIELDS:
            if message.get(name):
                marked[name] = self._insert_last(message[name], Field(index, "reasoning"))
        if "tool_calls" in message:
            marked["tool_calls"] = [
                {**call, "function": self._put_into_call(index, number, call["function"])}
                for number, call in enumerate(message["tool_calls"])
            ]
        return marked

    def _put_into_call(self, index: int, number: int, function: Mapping[str, Any]) -> dict[str, Any]:
        marked = {**function, "name": self._insert_last(function["name"], Field(index, "name", number))}
        arguments, field = function["arguments"], Field(index, "arguments", number)
        if isinstance(arguments, str):
            word = _LAST_WORD.search(arguments)  # inside of the JSON text, so that it stays an object
            if word:
                marked["arguments"] = self._insert(arguments, word.end(), field)
        else:
            marked["arguments"] = self._put_into_leaves(arguments, field)
        return marked

    def _put_into_leaves(self, value: Any, field: Field) -> Any:
        if isinstance(value, dict):
            return {key: self._put_into_leaves(item, field) for key, item in value.items()}
        if isinstance(value, list):
            return [self._put_into_leaves(item, field) for item in value]
        return self._insert_last(value, field) if isinstance(value, str) else value

    def _insert_last(self, text: str, field: Field) -> str:
        stripped = text.rstrip()
        tag = _LAST_TAG.search(stripped)
        return self._insert(text, tag.start() if tag else len(stripped), field) if stripped else text

    def _insert(self, text: str, position: int, field: Field) -> str:
        if _MARKER.search(text):
            raise RowError("the text has characters of Unicode's private use area A (U+F0000 to U+FFFFD)")
        return text[:position] + self._marker(field) + text[position:]

    def _marker(self, field: Field) -> str:
        if field not in self.fields:
            if _FIRST + len(self.fields) > _LAST:
                raise RowError(f"the chat has more than {_LAST - _FIRST} messages and tool calls")
            marker = chr(_FIRST + len(self.fields))
            self.fields[field] = marker
            self._fields_of[marker] = field
        return self.fields[field]


@dataclass(frozen=True)
class Located:
    """A rendered chat and the fields in it.

    Attributes:
        text: The rendered text, without markers.
        positions: For each rendered field, where its markers are: in ``text``, the index of the character after each.
    """

    text: str
    positions: Mapping[Field, Sequence[int]]

    def last_position(self, message: int) -> int | None:
        """The last marker of a message; None if none of its fields is rendered.

        A template may repeat the name of a tool call in the tool's answer, so names count once.
        """
        found = [
            places[0] if field.kind == "name" else places[-1]
            for field, places in self.positions.items()
            if field.message == message
        ]
        return max(found, default=None)

    def first_position(self, message: int) -> int | None:
        """The first marker of a message; None if none of its fields is rendered."""
        found = [places[0] for field, places in self.positions.items() if field.message == message]
        return min(found, default=None)
