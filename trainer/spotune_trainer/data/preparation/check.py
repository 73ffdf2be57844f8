"""Checks raw rows without writing shards, by the code that writes them: `spotune validate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spotune.errors import JobError
from spotune_trainer.data.preparation.inputs import RawInput, as_one_part, find_inputs
from spotune_trainer.data.preparation.parts import TokenizedRow, tokenize_part
from spotune_trainer.data.preparation.prepare import PrepareOptions, needed_columns, no_rows, nothing_to_learn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PROBLEMS: Final = 5
"""Problems after which the reading of a source ends."""
_REPORT_EVERY: Final = 1000


@dataclass(frozen=True)
class CheckedRows:
    """What was found in raw rows.

    Attributes:
        rows: Rows that were read.
        complete: Whether these are all rows.
        left_out: Those of them that would be left out, as far as `maxSkipped` allows.
        problems: Why shards of these rows cannot be written; at most `MAX_PROBLEMS`. Those of a row name file and line.
    """

    rows: int
    complete: bool
    left_out: int
    problems: tuple[str, ...]


def check_rows(
    inputs: Sequence[RawInput],
    options: PrepareOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_rows: int | None = None,
    report: Callable[[int], None] = lambda _rows: None,
) -> CheckedRows:
    """Read, render and tokenize rows as `prepare` does, and collect what it would refuse.

    Args:
        inputs: Files, folders, patterns and URLs.
        options: How rows become shards.
        tokenizer: The tokenizer.
        max_rows: Read so many rows from the start; None reads all.
        report: Called with the number of rows that were read, after each thousand of them.

    Raises:
        JobError: The options do not fit the tokenizer.
        InfrastructureError: A store did not answer, or did not send a file.
        OSError: A file cannot be read.
    """
    columns = needed_columns(options.text, tokenizer)
    reading = _Reading(report)
    try:
        part = as_one_part(find_inputs(inputs), columns)
        for row in tokenize_part(part, options.part, tokenizer, max_rows=max_rows, refuse=reading.refuse):
            reading.add(row)
    except (_TooManyProblemsError, JobError) as error:
        problems = reading.problems + [str(error)] * isinstance(error, JobError)
        return CheckedRows(reading.rows, False, reading.left_out, tuple(problems))
    complete = max_rows is None or reading.rows < max_rows
    if complete and not reading.rows:
        reading.problems.append(str(no_rows(inputs)))
    elif complete and reading.left_out == reading.rows:
        reading.problems.append(str(nothing_to_learn("train", reading.left_out_problems, reading.reasons)))
    return CheckedRows(reading.rows, complete, reading.left_out, tuple(reading.problems))


class _TooManyProblemsError(Exception):
    """So many rows were refused that the reading of their source ends."""


class _Reading:
    """Counts rows, and collects problems."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.rows = 0
        self.left_out = 0
        self.problems: list[str] = []
        self.left_out_problems: list[str] = []
        self.reasons: Counter[str] = Counter()
        self._report = report

    def add(self, row: TokenizedRow) -> None:
        """Count a row, and what of it is left out but allowed."""
        self.left_out_problems += row.problems[: MAX_PROBLEMS - len(self.left_out_problems)]
        self.reasons += row.outcome.left_out
        self.count(left_out=row.outcome.reason is not None)

    def count(self, *, left_out: bool) -> None:
        """Count a row."""
        self.rows += 1
        self.left_out += left_out
        if self.rows % _REPORT_EVERY == 0:
            self._report(self.rows)

    def refuse(self, error: JobError) -> None:
        """Count a row with a problem."""
        self.count(left_out=False)
        self.problems.append(str(error))
        if len(self.problems) == MAX_PROBLEMS:
            raise _TooManyProblemsError
