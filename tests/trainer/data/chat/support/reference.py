"""Reads ``golden/reference.yaml``: what each chat template lets a model learn from the conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from tests.trainer.data.chat.support.conversations import GOLDEN, tokenizer_with


@dataclass(frozen=True)
class Lost:
    """A conversation that a template does not render whole: what the message names, and the turns that remain."""

    reason: str
    remaining: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A conversation that a template refuses with this error."""

    error: str


Expected = tuple[str, ...] | Lost | Refused


@dataclass(frozen=True)
class Reference:
    """What a template lets a model learn. The fields are those of the file."""

    template: str
    eos: str
    special: str
    added: str
    fields: Mapping[str, Any]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A tokenizer with the template and its tokens."""
        return tokenizer_with(self.template, self.special, self.eos, self.added)

    def expected(self, conversation: str) -> Expected:
        """The texts that are trained on in a conversation."""
        others = self.fields.get("others", {})
        if conversation in others:
            return _expected(others[conversation])
        if conversation == "tools":
            calls = _expected(self.fields.get("tools", {"lost": "tool call 1 of message 2"}))
            return (*calls, *self._answers("Sunny.", "Welcome.")) if isinstance(calls, tuple) else calls
        if conversation == "thinking":
            first = self.fields.get("start", "") + "Ten." + self.fields["end"]
            return _expected(self.fields.get("thinking", {"lost": "reasoning of message 4", "remaining": [first]}))
        return self._answers(
            *{"plain": ["Ten."], "multi": ["Ten.", "Because.", "Yes."], "system": ["Ten.", "Because."]}[conversation]
        )

    def _answers(self, *answers: str) -> tuple[str, ...]:
        *others, last = answers
        start, end = self.fields.get("start", ""), self.fields["end"]
        last_start, last_end = self.fields.get("lastStart", start), self.fields.get("lastEnd", end)
        after = [self.fields["afterLast"]] if "afterLast" in self.fields else []
        return (*(f"{start}{answer}{end}" for answer in others), f"{last_start}{last}{last_end}", *after)


def _expected(value: Any) -> Expected:
    if isinstance(value, list):
        return tuple(value)
    return Refused(value["refused"]) if "refused" in value else Lost(value["lost"], tuple(value.get("remaining", ())))


def _read() -> dict[str, Reference]:
    entries = yaml.safe_load((GOLDEN / "reference.yaml").read_text(encoding="utf-8"))
    return {
        template: Reference(template, entry["eos"], entry.get("special", ""), entry.get("added", ""), entry)
        for entry in entries
        for template in entry["templates"]
    }


REFERENCES = _read()
"""The reference of each template, by its name in ``golden``."""
