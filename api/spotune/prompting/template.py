"""Prompt templates with the columns of a row as placeholders."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from spotune.errors import UsageError


class RowError(ValueError):
    """A row cannot be rendered. The message gives the reason; the caller adds the file and line."""


class Template:
    """A text with ``{column}`` placeholders. Write ``{{`` and ``}}`` for literal braces.

    Attributes:
        source: The template itself.
        columns: Names of the columns it uses, each once, in order of appearance.

    Raises:
        ValueError: A brace has no counterpart.
    """

    _TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")

    def __init__(self, template: str) -> None:
        self.source = template
        self._parts: list[tuple[str, str]] = []  # (literal text, column after it or "")
        position = 0
        for match in self._TOKEN.finditer(template):
            literal, column = template[position : match.start()], match.group(1) or ""
            position = match.end()
            if match.group() in {"{", "}"}:
                raise ValueError(
                    f"the template {template!r} has a lone {match.group()!r}; double it to write a literal brace"
                )
            self._parts.append((literal + ("" if column else match.group()[0]), column))
        self._parts.append((template[position:], ""))
        self.columns = list(dict.fromkeys(column for _, column in self._parts if column))

    def render(self, row: Mapping[str, Any]) -> str:
        """The template with the row's values filled in.

        Raises:
            RowError: A column is missing, is null, or holds neither text nor a number.
        """
        return "".join(literal + (column_text(row, column) if column else "") for literal, column in self._parts)


def column_text(row: Mapping[str, Any], column: str) -> str:
    """A column's value as text; numbers and booleans as JSON writes them.

    Raises:
        RowError: The column is missing, null, or holds neither text nor a number.
    """
    if column not in row:
        raise RowError(f"no column {column!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    value = row[column]
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise RowError(f"column {column!r} is {'null' if value is None else f'a {type(value).__name__}'}, not text")


def fill_prompt(template: str, question: str, fields: Mapping[str, Any]) -> str:
    """A prompt template, filled with fields and, for the one column that they lack, the question.

    Raises:
        UsageError: The fields do not match the template's columns, or a value cannot be rendered.
    """
    parsed = Template(template)
    try:
        return parsed.render(fill_fields(parsed.columns, template, question, fields))
    except RowError as error:
        raise UsageError(f"the prompt {template!r} cannot be filled: {error}.") from error


def fill_fields(columns: Sequence[str], template: str, question: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Values for all columns of a template: the given fields, and the question for the one column that is missing.

    Raises:
        UsageError: a field is unknown, several columns are missing, or none is left for the question.
    """
    missing = [name for name in columns if name not in fields]
    if not question and not missing:
        return dict(fields)  # a row of a dataset may have more columns than the prompt needs
    unknown = [name for name in fields if name not in columns]
    if unknown:
        raise UsageError(f"the prompt {template!r} has no field {unknown[0]!r}; it has {', '.join(columns) or 'none'}.")
    if not question:
        raise UsageError(f"the prompt {template!r} also needs {', '.join(missing)}: pass {_as_options(missing)}.")
    if len(missing) != 1:
        hint = f"pass {_as_options(missing)}, or a JSON object with all of them" if missing else "omit the question"
        raise UsageError(f"the question cannot be placed in the prompt {template!r}: {hint}.")
    return {**fields, missing[0]: question}


def _as_options(names: Sequence[str]) -> str:
    return " ".join(f"--field {name}=..." for name in names)
