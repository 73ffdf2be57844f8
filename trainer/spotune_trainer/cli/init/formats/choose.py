"""Chooses the row format from the columns."""

from __future__ import annotations

from collections.abc import Sequence

from spotune.errors import JobError
from spotune_trainer.cli.init.formats.answers import (
    Task,
    chat_format,
    find_completion,
    find_completion_column,
    find_plain_text,
    text_format,
    unusable_chat,
)
from spotune_trainer.cli.init.formats.fitting import OPTIONS, describe
from spotune_trainer.cli.init.formats.labels import (
    find_desirable,
    find_label,
    find_labelled_text,
    find_token_labels,
    labelled_answer_format,
    refuse_desirable,
)
from spotune_trainer.cli.init.formats.preferences import find_answers, pairs_format
from spotune_trainer.cli.init.formats.profile import ColumnProfile, RowFormat
from spotune_trainer.cli.init.formats.related_texts import find_related_texts
from spotune_trainer.data.chat.messages import SHAREGPT_ROLES

_TO_CHAT = (
    'jq -c \'.{0} |= map({{role: ({{human: "user", gpt: "assistant"}}[.from] // .from), content: .value}})\' '
    "rows.jsonl > chats.jsonl"
)


def choose_row_format(
    columns: Sequence[ColumnProfile],
    task: Task,
    *,
    has_chat_template: bool,
    is_encoder: bool = False,
    classifies_texts: bool = True,
    separator: str = "\n",
) -> RowFormat:
    """The row format that the columns suggest.

    Args:
        columns: All columns.
        task: Of the model. Seq2seq models learn completions only.
        has_chat_template: Whether the model's tokenizer can render chats.
        is_encoder: Whether the model generates no text. It learns labels and embeddings only.
        classifies_texts: Whether the model can get a head for labels of texts.
        separator: What divides several texts of one row that have a label.

    Raises:
        JobError: No format fits, or a column that it needs has no value in some rows. The message names the fix.
    """
    if task == "causal":
        found = _without_answers(columns, is_encoder=is_encoder, classifies_texts=classifies_texts, separator=separator)
        if found is not None:
            return found
    if is_encoder:
        raise JobError(
            f"the model is an encoder, which generates no text, and the columns have no labels or embeddings that are "
            f"known: {describe(columns)}. Name them with --text '{{...}}' --label COLUMN, or with --query '{{...}}' "
            "--positive '{...}'; or name a causal model"
        )
    return _generated(columns, task, has_chat_template=has_chat_template)


def _without_answers(
    columns: Sequence[ColumnProfile], *, is_encoder: bool, classifies_texts: bool, separator: str
) -> RowFormat | None:
    """The format for embeddings or labels; None if the columns suggest text that is generated."""
    if find_answers(columns) is not None and not is_encoder:
        return None
    found = find_related_texts(columns) or find_token_labels(columns)
    has_chat = any(column.kind == "chat" for column in columns)
    if found is not None or not classifies_texts or (has_chat and not is_encoder):
        return found
    label = find_label(columns, find_completion_column(columns), any_name=is_encoder)
    return None if label is None else find_labelled_text(columns, label, separator)


def _generated(columns: Sequence[ColumnProfile], task: Task, *, has_chat_template: bool) -> RowFormat:
    """The format for text that the model generates."""
    answers = find_answers(columns)
    if answers is not None and task == "causal":
        return pairs_format(columns, *answers, has_chat_template=has_chat_template)
    chat = next((column for column in columns if column.kind == "chat"), None)
    if chat is not None and task == "causal" and has_chat_template:
        return _with_label(columns, chat_format(columns, chat.name), task)
    completed = find_completion(columns, task, answers)
    if completed is not None:
        return _with_label(columns, completed, task)
    if chat is not None:
        raise JobError(unusable_chat(chat.name, task))
    sharegpt = next((column for column in columns if column.kind == "sharegpt"), None)
    if sharegpt is not None:
        raise JobError(
            f"column {sharegpt.name!r} has chats in ShareGPT's form (from, value) with other roles than "
            f"{', '.join(SHAREGPT_ROLES)}. Convert the rows first: {_TO_CHAT.format(sharegpt.name)}"
        )
    text = find_plain_text(columns)
    if text is None:
        raise JobError(f"the row format cannot be told from the columns: {describe(columns)}. Please {OPTIONS}.")
    if task == "seq2seq":
        raise JobError(
            f"the rows have plain text ({text.name!r}), but a seq2seq model learns a completion for each prompt: "
            f"{OPTIONS.split(', with')[0]}"
        )
    return text_format(columns, text.name)


def _with_label(columns: Sequence[ColumnProfile], answers: RowFormat, task: Task) -> RowFormat:
    """The format of answers, with the label if a column says whether they are desirable: sft would learn them all.

    Raises:
        JobError: The model cannot learn that.
    """
    label = find_desirable(columns, answers.completion)
    if label is None:
        return answers
    if task == "seq2seq":
        raise refuse_desirable(label, "--prompt and --completion")
    return labelled_answer_format(columns, answers, label.name)
