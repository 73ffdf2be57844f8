"""Text that is learned: a prompt with a completion, a chat, or plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from spotune_trainer.cli.init.formats.fitting import check_templates, checked_column, columns_of
from spotune_trainer.cli.init.formats.profile import ColumnProfile, RowFormat

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
NO_PROMPT: Final = "source"
"""Beside preference pairs, this column usually names where a row is from."""


def chat_format(columns: Sequence[ColumnProfile], messages: str) -> RowFormat:
    """The format for the chats in the column `messages`; a column `tools` holds the tools that they may call."""
    tools = "tools" if any(column.name == "tools" for column in columns) and messages != "tools" else ""
    with_tools = "; column 'tools' has the functions that it may call" if tools else ""
    return RowFormat(
        messages=checked_column(columns, messages),
        tools=tools,
        reason=f"Column {messages!r} has chat messages{with_tools}. The tokenizer's chat template "
        "renders them, and the model learns every assistant message (trainOn: last learns the last one only).",
    )


def completion_format(columns: Sequence[ColumnProfile], prompt: str, completion: str) -> RowFormat:
    """The format for two templates.

    Raises:
        JobError: A template names a column that does not fit. Or it is malformed.
    """
    check_templates(columns, prompt, completion)
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
    for name in columns_of(text) or [text]:
        checked_column(columns, name)
    return RowFormat(text=text, reason=f"{text!r} is plain text: the model learns all of it.")


def find_completion(
    columns: Sequence[ColumnProfile], task: Task, answers: tuple[ColumnProfile, ColumnProfile] | None
) -> RowFormat | None:
    """Prompt and completion, from the names of the columns; None if there are no such columns.

    Args:
        columns: All columns.
        task: Of the model.
        answers: Columns with preferred and rejected answers, of which this model learns the preferred ones.
    """
    by_name = {column.name: column for column in columns}
    completion = by_name.get(find_completion_column(columns))
    preferred = answers is not None and answers[0].fits_templates
    if answers is not None and preferred:
        completion = answers[0]
    before, left_out = prompt_columns(columns, ignored=NO_PROMPT if preferred else "")
    if completion is None or not before:
        return None
    for column in (completion, before[0]):
        checked_column(columns, column.name)
    found = completion_format(
        columns, prompt_template([column.name for column in before], task), f"{{{completion.name}}}"
    )
    names = ", ".join(column.name for column in before)
    reason = f"By the names of the columns: the model reads {names} and learns {completion.name}.{left_out}"
    if answers is not None and preferred:
        reason += (
            f" {answers[1].name!r} is not used: to learn from preferences (objective dpo, orpo or simpo) needs a "
            "causal model, and this is a seq2seq model, which learns the preferred answers."
        )
    if completion.empty:
        reason += f" {completion.empty:,} rows have an empty {completion.name!r}: the model learns to answer nothing."
    if completion.kind != "text":
        reason += f" {completion.name!r} holds {completion.kind}s: the model learns to write them as they are."
    return RowFormat(prompt=found.prompt, completion=found.completion, reason=reason)


def find_completion_column(columns: Sequence[ColumnProfile]) -> str:
    """The column that is usually to be learned, by its name; empty if there is none."""
    by_name = {column.name.lower(): column.name for column in columns if column.fits_templates}
    return next((by_name[name] for name in COMPLETIONS if name in by_name), "")


def prompt_columns(columns: Sequence[ColumnProfile], *, ignored: str) -> tuple[list[ColumnProfile], str]:
    """The columns of the prompt, by their names, and a remark on those of them that have gaps and are left out.

    If all have gaps, all are returned. `ignored` is a name that does not count.
    """
    by_name = {column.name.lower(): column for column in columns if column.fits_templates}
    found = [by_name[name] for name in PROMPTS if name in by_name and name != ignored]
    complete = [column for column in found if not column.missing_at] or found
    remarks = [
        f" {column.name!r} is left out: it has no value in some rows (the first is {column.missing_at})."
        for column in found
        if column not in complete
    ]
    return complete, "".join(remarks)


def prompt_template(names: Sequence[str], task: Task) -> str:
    """A template over columns. A seq2seq model has an encoder of its own, so its prompt needs no headings."""
    if task == "seq2seq":
        return " | ".join(f"{{{name}}}" for name in names)
    if [name.lower() for name in names] == ["prompt"]:
        return f"{{{names[0]}}}"
    sections = [f"### {name.replace('_', ' ').capitalize()}:\n{{{name}}}\n\n" for name in names]
    return "".join(sections) + "### Response:\n"


def find_plain_text(columns: Sequence[ColumnProfile]) -> ColumnProfile | None:
    """The column of plain text: by its name, or the only one with text."""
    texts = [column for column in columns if column.kind == "text" and column.fits_templates]
    named = [column for name in TEXTS for column in texts if column.name.lower() == name]
    return named[0] if named else texts[0] if len(texts) == 1 else None


def unusable_chat(name: str, task: Task) -> str:
    """Why a model cannot learn the chats of a column."""
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
