"""Chooses the row format from the columns: a chat, a prompt with a completion, or plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from spotune.errors import JobError
from spotune.prompting.template import Template
from spotune_trainer.cli.init.profiles import ColumnProfile, RowFormat

Task = Literal["causal", "seq2seq"]

COMPLETIONS: Final = (
    *("completion", "response", "answer", "output", "target", "chosen", "sql", "code", "summary", "highlights"),
    *("translation", "label_text", "label", "sentiment", "category"),
)
"""Names of columns that are usually to be learned, most specific first."""
PROMPTS: Final = (
    *("system", "instruction", "prompt", "question", "query", "input", "context", "premise", "hypothesis"),
    *("sentence", "sentence1", "sentence2", "schema", "columns", "title", "document", "article", "dialogue"),
    *("passage", "source", "text"),
)
"""Names of columns that usually precede them, in the order of the prompt."""
TEXTS: Final = ("text", "content", "body", "article", "document")
"""Names of columns that usually are plain text."""

_OPTIONS = "name the columns with --prompt '{...}' --completion '{...}', with --text COLUMN, or with --messages COLUMN"
_TO_CHAT = (
    'jq -c \'.{0} |= map({{role: ({{human: "user", gpt: "assistant"}}[.from] // .from), content: .value}})\' '
    "rows.jsonl > chats.jsonl"
)


def choose_row_format(columns: Sequence[ColumnProfile], task: Task, *, has_chat_template: bool) -> RowFormat:
    """The row format that the columns suggest.

    Args:
        columns: All columns.
        task: Of the model. Chats and plain text are for causal models.
        has_chat_template: Whether the model's tokenizer can render chats.

    Raises:
        JobError: No format fits, or a column that it needs has no value in some rows. The message names the fix.
    """
    chat = next((column for column in columns if column.kind == "chat"), None)
    if chat is not None and task == "causal" and has_chat_template:
        return chat_format(columns, chat.name)
    pair = _pair(columns, task)
    if pair is not None:
        return pair
    if chat is not None:
        raise JobError(_unusable_chat(chat.name, task))
    sharegpt = next((column for column in columns if column.kind == "sharegpt"), None)
    if sharegpt is not None:
        raise JobError(
            f"column {sharegpt.name!r} has chats in ShareGPT's form (from, value), which spotune does not read: it "
            f"reads role and content. Convert the rows first: {_TO_CHAT.format(sharegpt.name)}"
        )
    text = _plain_text(columns)
    if text is None:
        raise JobError(f"the row format cannot be told from the columns: {describe(columns)}. Please {_OPTIONS}.")
    if task == "seq2seq":
        raise JobError(
            f"the rows have plain text ({text.name!r}), but a seq2seq model learns pairs: {_OPTIONS.split(', with')[0]}"
        )
    return text_format(columns, text.name)


def chat_format(columns: Sequence[ColumnProfile], messages: str) -> RowFormat:
    """The format for the chats in the column `messages`; a column `tools` holds the tools that they may call."""
    tools = "tools" if any(column.name == "tools" for column in columns) and messages != "tools" else ""
    with_tools = "; column 'tools' has the functions that it may call" if tools else ""
    return RowFormat(
        messages=_checked(columns, messages),
        tools=tools,
        reason=f"Column {messages!r} has messages with role and content{with_tools}. The tokenizer's chat template "
        "renders them, and the model learns every assistant message (trainOn: last learns the last one only).",
    )


def pair_format(columns: Sequence[ColumnProfile], prompt: str, completion: str) -> RowFormat:
    """The format for two templates.

    Raises:
        JobError: A template names a column that does not fit. Or it is malformed.
    """
    for template in (prompt, completion):
        names = _columns_of(template)
        if not names:
            raise JobError(f"the template {template!r} names no column: write names in braces, such as '{{question}}'")
        for name in names:
            _checked(columns, name)
    return RowFormat(
        prompt=prompt,
        completion=completion,
        reason=f"The model reads {prompt!r} and learns {completion!r}. Names in braces are columns; the rest is yours "
        "to change.",
    )


def text_format(columns: Sequence[ColumnProfile], text: str) -> RowFormat:
    """The format for a column, or a template over columns, of plain text.

    Raises:
        JobError: A column does not fit.
    """
    for name in _columns_of(text) or [text]:
        _checked(columns, name)
    return RowFormat(text=text, reason=f"{text!r} is plain text: the model learns all of it.")


def describe(columns: Iterable[ColumnProfile]) -> str:
    """The columns with their kinds, for messages."""
    return ", ".join(f"{column.name!r} ({column.kind or 'null'})" for column in columns) or "there are none"


def _pair(columns: Sequence[ColumnProfile], task: Task) -> RowFormat | None:
    """Prompt and completion, from the names of the columns; None if there is no such pair."""
    by_name = {column.name.lower(): column for column in columns if column.fits_templates}
    completion = next((by_name[name] for name in COMPLETIONS if name in by_name), None)
    before = [by_name[name] for name in PROMPTS if name in by_name]
    if completion is None or not before:
        return None
    complete = [column for column in before if not column.missing_at] or before
    for column in (completion, complete[0]):
        _checked(columns, column.name)
    found = pair_format(columns, _prompt([column.name for column in complete], task), f"{{{completion.name}}}")
    names = ", ".join(column.name for column in complete)
    reason = f"By the names of the columns: the model reads {names} and learns {completion.name}."
    left_out = [column for column in before if column not in complete]
    for column in left_out:
        reason += f" {column.name!r} is left out: it has no value in some rows (the first is {column.missing_at})."
    if completion.empty:
        reason += f" {completion.empty:,} rows have an empty {completion.name!r}: the model learns to answer nothing."
    if completion.kind != "text":
        reason += f" {completion.name!r} holds {completion.kind}s: the model learns to write them as they are."
    return RowFormat(prompt=found.prompt, completion=found.completion, reason=reason)


def _prompt(names: Sequence[str], task: Task) -> str:
    """A template over columns. A seq2seq model has an encoder of its own, so its prompt needs no headings."""
    if task == "seq2seq":
        return " | ".join(f"{{{name}}}" for name in names)
    if [name.lower() for name in names] == ["prompt"]:
        return f"{{{names[0]}}}"
    sections = [f"### {name.replace('_', ' ').capitalize()}:\n{{{name}}}\n\n" for name in names]
    return "".join(sections) + "### Response:\n"


def _plain_text(columns: Sequence[ColumnProfile]) -> ColumnProfile | None:
    """The column of plain text: by its name, or the only one with text."""
    texts = [column for column in columns if column.kind == "text" and column.fits_templates]
    named = [column for name in TEXTS for column in texts if column.name.lower() == name]
    return named[0] if named else texts[0] if len(texts) == 1 else None


def _columns_of(template: str) -> list[str]:
    """The columns that a template names. Raises JobError if a brace has no counterpart."""
    try:
        return Template(template).columns
    except ValueError as error:
        raise JobError(str(error)) from error


def _checked(columns: Sequence[ColumnProfile], name: str) -> str:
    """The name of a column that has a value of a suitable kind in every row.

    Raises:
        JobError: It does not exist, or has other values.
    """
    column = next((column for column in columns if column.name == name), None)
    if column is None:
        raise JobError(f"there is no column {name!r}; the rows have {describe(columns)}")
    if column.missing_at:
        raise JobError(
            f"column {name!r} has no value in some rows; the first is {column.missing_at}. Give these rows a value, "
            f"remove them, or {_OPTIONS}."
        )
    if column.kind != "chat" and not column.fits_templates:
        other = next((kind for kind in column.kinds if kind not in ("text", "number", "boolean")), column.kind)
        raise JobError(
            f"column {name!r} holds values of the kind {other}, which a template cannot contain: write what is to be "
            "learned into a column of text"
        )
    return name


def _unusable_chat(name: str, task: Task) -> str:
    if task == "seq2seq":
        return (
            f"column {name!r} has chats, which seq2seq models cannot learn: write prompt and answer into columns of "
            "their own, or name a causal model with --model"
        )
    return (
        f"column {name!r} has chats, but the tokenizer has no chat template, so it is probably that of a base model: "
        "name the model's chat version with --model, or a tokenizer with a template and the same vocabulary with "
        "--tokenizer"
    )
