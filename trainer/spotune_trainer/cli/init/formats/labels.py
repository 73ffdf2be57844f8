"""Labels: of texts and of words, which a classifier learns, and of answers, which are desirable or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from spotune.errors import JobError
from spotune_trainer.cli.init.formats.answers import prompt_columns
from spotune_trainer.cli.init.formats.fitting import check_templates, column_named, columns_of
from spotune_trainer.cli.init.formats.profile import ColumnProfile, RowFormat

LABELS: Final = ("label_text", "label", "labels", "sentiment", "category", "class", "intent", "emotion", "stars")
"""Names of columns that usually have a label of the text beside them, those with readable labels first."""
_TOKENS: Final = ("tokens", "words")
_WORD_LABELS: Final = ("ner_tags", "tags", "labels", "label", "pos_tags", "chunk_tags", "upos")
_DESIRABLE: Final = ("label", "desirable", "good", "liked", "thumbs_up", "accepted", "correct")
"""Names of columns that usually say whether the answer beside them is desirable."""
_TRUE: Final = frozenset({"true", "1"})
_FALSE: Final = frozenset({"false", "0"})
_ROWS_PER_LABEL: Final = 3
"""Rows of a label, on average, below which a column is not taken for labels."""
_NO_LABEL: Final = "-1"
_SHOWN: Final = 5


def find_label(columns: Sequence[ColumnProfile], completion: str, *, any_name: bool) -> ColumnProfile | None:
    """The column with the label of a text; None if there is none.

    Args:
        columns: All columns.
        completion: The column that would be learned as text; empty if there is none. Others are then no labels.
        any_name: Whether the column of `completion` may have any name, because the model generates no text.
    """
    by_name = {column.name.lower(): column for column in columns}
    named = [by_name[name] for name in LABELS if name in by_name]
    learned = [column for column in columns if column.name == completion and (any_name or column in named)]
    return next(filter(_has_labels, learned if completion else named), None)


def find_labelled_text(columns: Sequence[ColumnProfile], label: ColumnProfile, separator: str) -> RowFormat | None:
    """The format for texts with a label: the text is in the columns that are known, or in the only one with text.

    Args:
        columns: All columns.
        label: The column with the label.
        separator: What divides several texts of a row.
    """
    others = [column for column in columns if column != label]
    texts, left_out = prompt_columns([column for column in others if column.kind == "text"], ignored="source")
    if not texts:
        texts = [column for column in others if column.kind == "text" and column.fits_templates]
        if len(texts) != 1:
            return None
    text = separator.join(f"{{{column.name}}}" for column in texts)
    names = ", ".join(column.name for column in texts)
    reason = f"By the names of the columns: the model reads {names} and learns {label.name}.{left_out}"
    found = labelled_text_format(columns, text, label.name)
    return replace(found, reason=f"{reason} {found.reason}")


def labelled_text_format(columns: Sequence[ColumnProfile], text: str, label: str) -> RowFormat:
    """The format for texts, or lists of words, with labels. The labels are those of the rows.

    Args:
        columns: All columns.
        text: Column or template of the text; a column with lists of words.
        label: Column of the label, or of the lists of their labels, also in braces.

    Raises:
        JobError: A column does not fit, or the column of the label has too many different values.
    """
    column = column_named(columns, label.strip("{}"))
    names = columns_of(text) or [text]
    each_word = column_named(columns, names[0]).kind == "texts"
    template = text if "{" in text else f"{{{text}}}"
    if each_word:
        if template != f"{{{names[0]}}}":
            raise JobError(f"column {names[0]!r} has lists of words, which are labelled one by one: name it alone")
        if column.kind not in ("texts", "numbers"):
            raise JobError(
                f"column {names[0]!r} has lists of words, but {column.name!r} has no lists with their labels"
            )
    else:
        check_templates(columns, template)
        if not column.fits_templates:
            raise JobError(f"column {column.name!r} holds values of the kind {column.kind}, which are no labels")
    labels = label_names(column)
    shown = ", ".join(labels[:_SHOWN]) + (", ..." if len(labels) > _SHOWN else "")
    what = "each word" if each_word else "a text"
    reason = f"A classifier: {column.name!r} has the label of {what}, {len(labels)} different ones ({shown})."
    if not each_word:
        reason += " To let the model write labels as text, give init --prompt and --completion."
    return RowFormat(text=template, label=f"{{{column.name}}}", labels=labels, label_each_word=each_word, reason=reason)


def find_token_labels(columns: Sequence[ColumnProfile]) -> RowFormat | None:
    """The format for lists of words with a label for each; None if there are no such columns."""
    by_name = {column.name.lower(): column for column in columns}
    tokens = next((by_name[name] for name in _TOKENS if name in by_name and by_name[name].kind == "texts"), None)
    tags = [by_name[name] for name in _WORD_LABELS if name in by_name and by_name[name].kind in ("texts", "numbers")]
    tags = [column for column in tags if len(column.values) > 1]
    if tokens is None or not tags:
        return None
    found = labelled_text_format(columns, tokens.name, tags[0].name)
    reason = f"By the names of the columns: the model reads {tokens.name} and learns {tags[0].name} of each word."
    return replace(found, reason=f"{reason} {found.reason}")


def find_desirable(columns: Sequence[ColumnProfile], completion: str) -> ColumnProfile | None:
    """The column that says whether the answer beside it is desirable; None if there is none, or all answers are.

    Args:
        columns: All columns.
        completion: Template of the answer; empty for chats.
    """
    for column in columns:
        named = column.name.lower() in _DESIRABLE and completion != f"{{{column.name}}}"
        if named and _is_desirable(column) and undesirable_rows(column):
            return column
    return None


def labelled_answer_format(columns: Sequence[ColumnProfile], answers: RowFormat, label: str) -> RowFormat:
    """The format for answers that are desirable or not.

    Args:
        columns: All columns.
        answers: The format of the answers: a completion, or a chat.
        label: Column that says whether an answer is desirable, also in braces.

    Raises:
        JobError: The column has other values than true and false, or 1 and 0.
    """
    column = column_named(columns, label.strip("{}"))
    if not _is_desirable(column):
        raise JobError(
            f"column {column.name!r} does not say by true or false, 1 or 0, whether an answer is desirable. For labels "
            "of texts give --text with --label"
        )
    options = "--messages" if answers.messages else "--prompt and --completion"
    reason = (
        f"{answers.reason} {column.name!r} says whether the answer is desirable: {desirable_rows(column):,} are, "
        f"{undesirable_rows(column):,} are not. To learn all answers as text, give init {options} without --label."
    )
    return replace(answers, label=f"{{{column.name}}}", reason=reason)


def refuse_desirable(column: ColumnProfile, options: str) -> JobError:
    """The error for a model that cannot learn whether answers are desirable: it would learn all of them.

    Args:
        column: The column that says which ones are.
        options: Options of the command line that name the answers.
    """
    return JobError(
        f"column {column.name!r} says whether an answer is desirable, which only causal models learn (objective kto): "
        f"name one with --model. If all answers are to be learned, name them with {options}"
    )


def label_names(column: ColumnProfile) -> tuple[str, ...]:
    """All labels of a column, in the order of the model's outputs.

    Numbers from 0 are in their order, without gaps. In IOB2 format O is the first, and labels of one type are
    beside each other. Others are sorted.

    Raises:
        JobError: There are too few or too many different values, or one that usually means that there is no label.
    """
    if len(column.values) < 2:
        what = "less than two" if column.values else "too many"
        raise JobError(f"column {column.name!r} has {what} different values: name a column with a few different labels")
    if not all(name.removeprefix("-").isdecimal() for name in column.values):
        return tuple(sorted(column.values, key=_in_order))
    numbers = sorted(map(int, column.values))
    if _NO_LABEL in column.values:
        raise JobError(
            f"column {column.name!r} is {_NO_LABEL} in some rows, which usually means that these have no label: remove "
            "the rows"
        )
    if numbers[0] == 0 and numbers[-1] < 2 * len(numbers):
        return tuple(map(str, range(numbers[-1] + 1)))
    return tuple(sorted(column.values, key=int))


def desirable_rows(column: ColumnProfile) -> int:
    """Rows whose answer is desirable."""
    return sum(rows for value, rows in column.values.items() if value.strip().lower() in _TRUE)


def undesirable_rows(column: ColumnProfile) -> int:
    """Rows whose answer is not desirable."""
    return sum(rows for value, rows in column.values.items() if value.strip().lower() in _FALSE)


def _is_desirable(column: ColumnProfile) -> bool:
    values = {value.strip().lower() for value in column.values}
    return bool(values) and values <= _TRUE | _FALSE


def _has_labels(column: ColumnProfile) -> bool:
    """Whether the values of a column may be labels: a few, and each in several rows."""
    few = 1 < len(column.values) <= column.rows / _ROWS_PER_LABEL
    return few and column.fits_templates


def _in_order(name: str) -> tuple[bool, str, str]:
    prefix, dash, kind = name.partition("-")
    return (name != "O", kind if dash else name, prefix if dash else "")
