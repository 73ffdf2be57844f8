"""Labels of texts and of words in the columns of a row, and their positions in ``dataset.labels``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spotune.prompting.template import RowError

_SHOWN_LABELS: Final = 10


class LabelIds:
    """The position of each label in ``dataset.labels``, which is the model's output for it.

    Args:
        labels: All labels. A row may have a position instead of a name, unless a name is a decimal number.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._ids = {name: position for position, name in enumerate(labels)}
        if not any(name.isdecimal() for name in labels):
            self._ids |= {str(position): position for position in range(len(labels))}
        shown = ", ".join(labels[:_SHOWN_LABELS])
        self._shown = shown + ", ..." * (len(labels) > _SHOWN_LABELS)

    def position(self, value: Any) -> int:
        """The position of a label.

        Raises:
            RowError: It is none of the labels.
        """
        name = value if isinstance(value, str) else json.dumps(value, default=str)
        found = self._ids.get(name)
        if found is None:
            raise RowError(
                f"the label {name!r} is not in dataset.labels ({self._shown}): correct the row, or add the label"
            )
        return found


def column_value(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column.

    Raises:
        RowError: The row does not have it.
    """
    if column not in row:
        raise RowError(f"no column {column!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    return row[column]


def read_word_labels(row: Mapping[str, Any], column: str, label_column: str) -> tuple[list[str], list[Any]]:
    """The words of a row, and their labels as the row has them.

    Args:
        row: The row.
        column: Of the list of words.
        label_column: Of the list of labels.

    Raises:
        RowError: A column is missing or no list, the lists have different lengths, or there is no word.
    """
    lists = []
    for name, field in ((column, "text"), (label_column, "label")):
        remedy = f"correct the row, or dataset.{field} of the job"
        try:
            value = column_value(row, name)
        except RowError as error:
            raise RowError(f"{error}: {remedy}") from error
        if not isinstance(value, list):
            kind = "null" if value is None else f"a {type(value).__name__}"
            raise RowError(f"column {name!r} is {kind}, not a list with an entry for each word: {remedy}")
        lists.append(value)
    found, tags = lists
    if len(found) != len(tags):
        raise RowError(
            f"{column!r} has {len(found)} words, but {label_column!r} has {len(tags)} labels: correct the row"
        )
    if not found:
        raise RowError(f"{column!r} has no words: remove the row")
    for number, word in enumerate(found, start=1):
        if not isinstance(word, str) or not word.strip():
            raise RowError(f"word {number} of {column!r} is {word!r}, not text: correct the row")
    return found, tags
