"""What the row format is told from, and what it is: the profile of a column, and the fields of `dataset`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["text", "number", "boolean", "chat", "answer", "sharegpt", "texts", "numbers", "list", "object"]
"""Kind of a value. chat: a list of messages with role and content, or ShareGPT's from and value. answer: one of the
assistant's messages only, whose prompt is in another column. sharegpt: messages of ShareGPT with unknown roles. texts
and numbers: lists of them, such as words and their labels. list: any other list."""

TEMPLATE_KINDS: frozenset[Kind] = frozenset({"text", "number", "boolean"})
"""Kinds that a template can contain."""


@dataclass(frozen=True)
class ColumnProfile:
    """A column of all rows.

    Attributes:
        name: Its name.
        rows: Rows that have a value other than null.
        empty: Rows whose value is an empty text or list.
        kinds: Number of values by kind.
        missing_at: File and line of the first row without a value; empty if every row has one.
        scripts: Number of letters by Unicode script, in a sample of the rows.
        values: Number of rows by value, as `dataset.labels` names it; of a column with lists, number of their entries.
            Empty if there are too many different values, or long ones, for labels.
    """

    name: str
    rows: int
    empty: int
    kinds: Mapping[Kind, int]
    missing_at: str
    scripts: Mapping[str, int]
    values: Mapping[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> Kind | None:
        """The kind of most values; None if all are null."""
        return max(self.kinds, key=lambda kind: self.kinds[kind], default=None)

    @property
    def fits_templates(self) -> bool:
        """Whether a template can contain every value that is not null."""
        return bool(self.kinds) and self.kinds.keys() <= TEMPLATE_KINDS and not set("{}") & set(self.name)

    @property
    def script(self) -> str:
        """The Unicode script of most letters, such as Latin; empty without letters."""
        return max(self.scripts, key=lambda script: self.scripts[script], default="")


@dataclass(frozen=True)
class RowFormat:
    """How a row becomes text: the fields of `dataset` with these names, and the reason for them.

    With `chosen` and `rejected`, rows are preference pairs: two answers to the same prompt. With `label`, they are
    texts or words with labels if `text` is set, or else answers that are desirable or not.
    """

    prompt: str = ""
    completion: str = ""
    text: str = ""
    messages: str = ""
    tools: str = ""
    chosen: str = ""
    rejected: str = ""
    label: str = ""
    labels: tuple[str, ...] = ()
    label_each_word: bool = False
    query: str = ""
    positive: str = ""
    negative: str = ""
    reason: str = ""

    @property
    def has_labelled_texts(self) -> bool:
        """Whether rows are texts with a label, or words with one each."""
        return bool(self.label and self.text)

    @property
    def has_labelled_answers(self) -> bool:
        """Whether rows are answers that are desirable or not."""
        return bool(self.label and not self.text)

    @property
    def is_plain_text(self) -> bool:
        """Whether rows are plain text, which is packed."""
        return bool(self.text and not self.label)

    @property
    def templates(self) -> str:
        """All templates, one after the other; a column that is no template is in braces."""
        columns = [self.messages, self.tools, *([] if "{" in self.text else [self.text])]
        named = "".join(f"{{{column}}}" for column in columns if column)
        answers = self.prompt + self.completion + self.chosen + self.rejected
        return named + self.text + answers + self.label + self.query + self.positive + self.negative

    @property
    def description(self) -> str:
        """What the rows are, for people."""
        if self.label:
            answers = "answers with a label"
            return "words with labels" if self.label_each_word else "texts with a label" if self.text else answers
        if self.query:
            return "texts that belong together"
        if self.chosen:
            return "preference pairs"
        return "prompt and completion" if self.completion else "plain text" if self.text else "chats"
