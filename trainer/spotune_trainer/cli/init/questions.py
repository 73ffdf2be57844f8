"""The questions of `spotune init --interactive`, each with the detected answer as its default."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import typer

from spotune.errors import JobError, UsageError
from spotune_trainer.cli.init.formats.answers import chat_format, completion_format, text_format
from spotune_trainer.cli.init.formats.fitting import column_named, columns_of, describe
from spotune_trainer.cli.init.formats.labels import labelled_answer_format, labelled_text_format
from spotune_trainer.cli.init.formats.preferences import preference_format
from spotune_trainer.cli.init.formats.profile import ColumnProfile, RowFormat
from spotune_trainer.cli.init.formats.related_texts import related_texts_format

Made = TypeVar("Made")

_FORMATS = ("completion", "text", "messages", "chosen", "query", "label")
_LABELLED = ("text", "completion", "messages")
_LABEL = "Column of the label"


def ask_row_format(columns: Sequence[ColumnProfile], detected: RowFormat | None, problem: str) -> RowFormat:
    """Ask how a row becomes text.

    Args:
        columns: All columns.
        detected: The default; None if there is none.
        problem: Why there is none.
    """
    typer.echo(f"Columns: {describe(columns)}", err=True)
    if problem:
        typer.echo(problem, err=True)
    default = detected or RowFormat()
    named = next((name for name in reversed(_FORMATS) if getattr(default, name)), None)
    kind = _ask(f"Row format ({', '.join(_FORMATS)})", named, _one_of(_FORMATS))
    if kind == "label":
        return _ask_labelled(columns, default)
    if kind == "query":
        return _ask_related_texts(columns, default)
    if kind == "messages":
        return _ask_column("Column of chat messages", default.messages, lambda name: chat_format(columns, name))
    if kind == "text":
        return _ask_column("Column or template of plain text", default.text, lambda name: text_format(columns, name))
    if kind == "chosen":
        return _ask_preferences(columns, default)
    prompt = _ask_template(columns, "Prompt: a template such as '{question}'", default.prompt)
    completion = _ask_template(columns, "Completion: a template such as '{answer}'", default.completion)
    if (prompt, completion) == (default.prompt, default.completion):
        return default
    return completion_format(columns, prompt, completion)


def ask_epochs(default: int) -> int:
    """Ask for the passes over the rows."""
    epochs: int = _ask("Epochs", str(default), _positive)
    return epochs


def ask_output_file(default: str, *, force: bool) -> str:
    """Ask where the job file is written; `-` is standard output. An existing file needs `force`."""
    path: str = _ask("Job file to write ('-': print it)", default, lambda answer: _new_file(answer, force))
    return path


def _ask_labelled(columns: Sequence[ColumnProfile], default: RowFormat) -> RowFormat:
    """Ask for a text and its label, or for words and their labels, or for an answer and whether it is desirable."""
    named = next((name for name in _LABELLED if getattr(default, name)), "text")
    kind = _ask(f"What has the label ({', '.join(_LABELLED)})", named, _one_of(_LABELLED))
    if kind == "text":
        text: str = _ask("Column or template of the text", default.text or None, lambda name: _text(columns, name))
        found = _ask_column(_LABEL, default.label.strip("{}"), lambda label: labelled_text_format(columns, text, label))
    else:
        answers = _ask_answers(columns, kind, default)
        found = _ask_column(
            _LABEL, default.label.strip("{}"), lambda label: labelled_answer_format(columns, answers, label)
        )
    return default if replace(found, reason=default.reason) == default else found


def _ask_answers(columns: Sequence[ColumnProfile], kind: str, default: RowFormat) -> RowFormat:
    """Ask for the answers that have a label: completions, or chats."""
    if kind == "messages":
        return _ask_column("Column of chat messages", default.messages, lambda name: chat_format(columns, name))
    prompt = _ask_template(columns, "Prompt: a template such as '{question}'", default.prompt)
    completion = _ask_template(columns, "Completion: a template such as '{answer}'", default.completion)
    return completion_format(columns, prompt, completion)


def _ask_related_texts(columns: Sequence[ColumnProfile], default: RowFormat) -> RowFormat:
    """Ask for texts that belong together."""
    query = _ask_template(columns, "Text: a template such as '{question}'", default.query)
    positive = _ask_template(columns, "Text near to it: a template such as '{passage}'", default.positive)
    if (query, positive) == (default.query, default.positive):
        return default
    return related_texts_format(columns, query, positive, "")


def _ask_preferences(columns: Sequence[ColumnProfile], default: RowFormat) -> RowFormat:
    """Ask for the answers of preference pairs, and for their prompt if they are text."""
    chosen = _ask_template(columns, "Preferred answer: a template such as '{chosen}'", default.chosen)
    rejected = _ask_template(columns, "Rejected answer: a template such as '{rejected}'", default.rejected)
    prompt = ""
    if all(column.fits_templates for column in columns if f"{{{column.name}}}" in chosen + rejected):
        prompt = _ask_template(columns, "Prompt: a template such as '{question}'", default.prompt)
    if (prompt, chosen, rejected) == (default.prompt, default.chosen, default.rejected):
        return default
    return preference_format(columns, prompt, chosen, rejected)


def _ask_template(columns: Sequence[ColumnProfile], question: str, default: str) -> str:
    template: str = _ask(question, _escaped(default), lambda text: _template(columns, text))
    return template


def _ask_column(question: str, default: str, make: Callable[[str], RowFormat]) -> RowFormat:
    found: RowFormat = _ask(question, default or None, lambda name: _checked(make, name))
    return found


def _ask(question: str, default: str | None, check: Callable[[str], Any]) -> Any:
    """Ask until `check` accepts the answer; returns what it returns. Standard output is left to the job file."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return typer.prompt(question, default=default or None, value_proc=check, err=True)
    except typer.Abort as error:
        raise UsageError(f"no answer to the question {question!r}: the input has ended") from error


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def check(answer: str) -> str:
        if answer not in names:
            raise typer.BadParameter(f"{answer!r}: give one of {', '.join(names)}")
        return answer

    return check


def _positive(answer: str) -> int:
    if not answer.isdecimal() or int(answer) < 1:
        raise typer.BadParameter(f"{answer!r}: give a whole number from 1")
    return int(answer)


def _new_file(answer: str, force: bool) -> str:
    if answer != "-" and Path(answer).exists() and not force:
        raise typer.BadParameter(f"{answer} exists: give another name, or start again with --force")
    return answer


def _template(columns: Sequence[ColumnProfile], answer: str) -> str:
    """The template of an answer, in which a backslash and n are a line break."""
    template = answer.replace("\\n", "\n")
    _checked(lambda text: completion_format(columns, text, text), template)
    return template


def _text(columns: Sequence[ColumnProfile], answer: str) -> str:
    """The column or template of a text, or the column of lists of words."""
    for name in _checked(columns_of, answer) or [answer]:
        _checked(lambda column: column_named(columns, column), name)
    return answer


def _escaped(template: str) -> str | None:
    return template.replace("\n", "\\n") or None


def _checked(make: Callable[[str], Made], answer: str) -> Made:
    try:
        return make(answer)
    except JobError as error:
        raise typer.BadParameter(str(error)) from error
