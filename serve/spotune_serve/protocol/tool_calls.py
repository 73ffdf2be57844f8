"""Tool calls in a text, as Hermes and Qwen models write them.

They write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


@dataclass(frozen=True)
class ParsedCall:
    """A tool call.

    Attributes:
        name: the function's name.
        arguments: its arguments as JSON.
    """

    name: str
    arguments: str


def call_frame(name: str) -> tuple[str, str]:
    """What a model writes before and after the arguments of a call, with the line breaks of Hermes and Qwen."""
    return f'{_OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', f"}}\n{_CLOSE}"


class ToolCallParser:
    """Divides a text into tool calls and other text, while it arrives. What is not a valid call remains text.

    Attributes:
        num_calls: calls found so far.
    """

    def __init__(self) -> None:
        self._held = ""
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ParsedCall]]:
        """The text and the calls that are complete with this text."""
        self._held += text
        parts: list[str] = []
        calls: list[ParsedCall] = []
        while (start := self._held.find(_OPEN)) >= 0:
            parts.append(self._outside(self._held[:start]))
            close = self._held.find(_CLOSE, start)
            if close < 0:
                self._held = self._held[start:]
                return "".join(parts), calls
            block, self._held = self._held[start : close + len(_CLOSE)], self._held[close + len(_CLOSE) :]
            call = _parse(block)
            if call is None:
                parts.append(block)
            else:
                calls.append(call)
                self.num_calls += 1
        parts.append(self._release())
        return "".join(parts), calls

    def flush(self) -> tuple[str, list[ParsedCall]]:
        """What was held back; no text may follow. A last call may lack its closing tag."""
        held, self._held = self._held, ""
        call = _parse(held + _CLOSE) if held.startswith(_OPEN) else None
        if call is not None:
            self.num_calls += 1
            return "", [call]
        return self._outside(held), []

    def _release(self) -> str:
        """The held text, up to what may become the start of a call."""
        keep = next((n for n in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:n])), 0)
        text = self._held[: len(self._held) - keep]
        if self.num_calls and not text.strip():
            return ""  # wait: it may be the space between two calls
        self._held = self._held[len(self._held) - keep :]
        return text

    def _outside(self, text: str) -> str:
        """Text outside of calls, without the space after a call."""
        return "" if self.num_calls and not text.strip() else text


def _parse(block: str) -> ParsedCall | None:
    """A block with its tags; None if it is not a call."""
    try:
        value = json.loads(block[len(_OPEN) : -len(_CLOSE)])
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        return ParsedCall(value["name"], arguments)
    return ParsedCall(value["name"], json.dumps(arguments, ensure_ascii=False))
