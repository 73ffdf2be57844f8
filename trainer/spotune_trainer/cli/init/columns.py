"""Reads all rows once, for a profile of each column."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from spotune.errors import JobError
from spotune_trainer.cli.init.formats.profile import ColumnProfile, Kind
from spotune_trainer.data.chat.messages import SHAREGPT_ROLES
from spotune_trainer.data.preparation.inputs import RawInput, columns_of_files, find_inputs, rows_in_order

_SCRIPT_ROWS: Final = 200
_SCRIPT_CHARACTERS: Final = 400
_REPORT_EVERY: Final = 1000
_MAX_VALUES: Final = 200
"""Most different values of a column that are counted: more are no labels."""
_MAX_VALUE_CHARACTERS: Final = 80


def profile_columns(
    source: RawInput, report: Callable[[int], None] = lambda _rows: None
) -> tuple[int, tuple[ColumnProfile, ...]]:
    """The number of rows, and a profile of each column.

    Args:
        source: A file, a folder, a pattern or a dataset.
        report: Called with the number of rows that were read.

    Raises:
        JobError: There is no file or no row, or a file is damaged; the message names file and line.
    """
    columns: dict[str, _Counts] = {}
    rows, first_place = 0, ""
    for file_range, number, row in rows_in_order([source], columns_of_files(find_inputs([source]))):
        first_place = first_place or file_range.location(number)
        for name, value in row.items():
            if value is not None:
                counts = columns.setdefault(name, _Counts(missing_at=first_place if rows else ""))
                counts.add(value, sample_script=rows < _SCRIPT_ROWS)
        for counts in columns.values():
            if not counts.missing_at and counts.rows <= rows:
                counts.missing_at = file_range.location(number)
        rows += 1
        if rows % _REPORT_EVERY == 0:
            report(rows)
    if not rows:
        raise JobError(f"{source} has no rows: write one JSON object per line, or a CSV file with a header and rows")
    return rows, tuple(counts.profile(name) for name, counts in columns.items())


def kind_of(value: Any) -> Kind:
    """The kind of a value that is not null. Text that holds a chat as JSON, as in CSV files, is a chat."""
    if isinstance(value, str):
        messages = _json_list(value)
        return _kind_of_list(messages) if messages and _kind_of_list(messages) != "list" else "text"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return _kind_of_list(value) if isinstance(value, list) else "object"


@dataclass
class _Counts:
    missing_at: str
    rows: int = 0
    empty: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    values: Counter[str] | None = field(default_factory=Counter)

    def add(self, value: Any, *, sample_script: bool) -> None:
        self.rows += 1
        self.empty += value in ("", [])
        self.kinds[kind_of(value)] += 1
        for entry in value if isinstance(value, list) else [value]:
            self._add_value(entry)
        if sample_script and isinstance(value, str):
            self.scripts.update(map(_script, filter(str.isalpha, value[:_SCRIPT_CHARACTERS])))

    def profile(self, name: str) -> ColumnProfile:
        scripts, values = dict(self.scripts), dict(self.values or {})
        return ColumnProfile(name, self.rows, self.empty, dict(self.kinds), self.missing_at, scripts, values)

    def _add_value(self, value: Any) -> None:
        if self.values is None:
            return
        name = json.dumps(value) if isinstance(value, int) else value
        if isinstance(name, str) and len(name) <= _MAX_VALUE_CHARACTERS:
            self.values[name] += 1
        if not isinstance(name, str) or len(name) > _MAX_VALUE_CHARACTERS or len(self.values) > _MAX_VALUES:
            self.values = None


def _script(letter: str) -> str:
    """The first word of a letter's Unicode name, which is its script: Latin, Cyrillic, CJK."""
    script = unicodedata.name(letter, "Unnamed").partition(" ")[0]
    return script if script == "CJK" else script.capitalize()


def _json_list(text: str) -> list[Any]:
    if not text.lstrip().startswith("[{"):
        return []
    try:
        value = json.loads(text)
    except ValueError:
        return []
    return value if isinstance(value, list) else []


def _kind_of_list(values: list[Any]) -> Kind:
    messages = [value for value in values if isinstance(value, dict)]
    if not values or len(messages) < len(values):
        return _kind_of_entries(values)
    if all(isinstance(message.get("role"), str) for message in messages):
        return _kind_of_chat({message["role"] for message in messages})
    if not all({"from", "value"} <= message.keys() for message in messages):
        return "list"
    roles = {SHAREGPT_ROLES.get(str(message["from"]), "") for message in messages}
    return _kind_of_chat(roles) if "" not in roles else "sharegpt"


def _kind_of_chat(roles: set[str]) -> Kind:
    return "answer" if roles == {"assistant"} else "chat"


def _kind_of_entries(values: list[Any]) -> Kind:
    if values and all(isinstance(value, str) for value in values):
        return "texts"
    are_numbers = values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return "numbers" if are_numbers else "list"
