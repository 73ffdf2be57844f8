"""Checks that the columns of a row format exist, and that all rows have a suitable value in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from spotune.errors import JobError
from spotune.prompting.template import Template
from spotune_trainer.cli.init.formats.profile import ColumnProfile

OPTIONS: Final = (
    "name the columns with --prompt '{...}' --completion '{...}', with --text COLUMN, with --messages COLUMN, with "
    "--chosen '{...}' --rejected '{...}', with --text COLUMN --label COLUMN, or with --query '{...}' --positive '{...}'"
)


def describe(columns: Iterable[ColumnProfile]) -> str:
    """The columns with their kinds, for messages."""
    return ", ".join(f"{column.name!r} ({column.kind or 'null'})" for column in columns) or "there are none"


def check_templates(columns: Sequence[ColumnProfile], *templates: str) -> None:
    """Raise JobError if a template names no column, or one that does not fit."""
    for template in templates:
        names = columns_of(template)
        if not names:
            raise JobError(f"the template {template!r} names no column: write names in braces, such as '{{question}}'")
        for name in names:
            checked_column(columns, name)


def columns_of(template: str) -> list[str]:
    """The columns that a template names. Raises JobError if a brace has no counterpart."""
    try:
        return Template(template).columns
    except ValueError as error:
        raise JobError(str(error)) from error


def column_named(columns: Sequence[ColumnProfile], name: str) -> ColumnProfile:
    """The column with a value in every row, whatever its kind.

    Raises:
        JobError: It does not exist, or has no value in some rows.
    """
    column = next((column for column in columns if column.name == name), None)
    if column is None:
        raise JobError(f"there is no column {name!r}; the rows have {describe(columns)}")
    if column.missing_at:
        raise JobError(
            f"column {name!r} has no value in some rows; the first is {column.missing_at}. Give these rows a value, "
            f"remove them, or {OPTIONS}."
        )
    return column


def checked_column(columns: Sequence[ColumnProfile], name: str) -> str:
    """The name of a column that has a value of a suitable kind in every row.

    Raises:
        JobError: It does not exist, or has other values.
    """
    column = column_named(columns, name)
    if column.kind not in ("chat", "answer") and not column.fits_templates:
        other = next((kind for kind in column.kinds if kind not in ("text", "number", "boolean")), column.kind)
        raise JobError(
            f"column {name!r} holds values of the kind {other}, which a template cannot contain: write what is to be "
            "learned into a column of text"
        )
    return name
