"""Metrics of generated answers: pure functions of the prediction, the reference and the row's other columns.

A metric returns True, False, a number (only functions of the user do), or None if the row does not count. `METRICS` has
the built-in ones by their name in `training.evaluation.metrics`. `loss` is not among them, because it needs no answer.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from spotune.errors import JobError
from spotune.job import EvaluationSpec, SqlSpec
from spotune.job.training.metric import is_function, metric_name
from spotune_trainer.evaluation.custom_metrics import FIELD, Metric, load_custom_metric

Value = str | bytes | int | float | None
Row = tuple[Value, ...]

QUERY_SECONDS = 5.0
_INSTRUCTIONS_PER_DEADLINE_CHECK = 10_000  # of SQLite's virtual machine; takes well under a millisecond
_LARGEST_VALUE_BYTES = 10_000_000
_SIGNIFICANT_DIGITS = 9

# A query may only read: no ATTACH (which could create files), no PRAGMA, no writes.
_ALLOWED_ACTIONS = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)


class QueryError(Exception):
    """A query is invalid, or exceeded its time limit."""


def exact_match(prediction: str, reference: str, columns: Mapping[str, Any] | None = None) -> bool:
    """Whether two texts are equal after whitespace is collapsed and stripped. Case matters."""
    return prediction.split() == reference.split()


def execution_match(
    prediction: str,
    reference: str,
    database: Path,
    seconds: float = QUERY_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> bool | None:
    """Whether two SQL queries return the same rows of a SQLite file (execution accuracy, Zhong et al. 2017, WikiSQL).

    Rows are compared as multisets: their order does not matter, their multiplicity does. Columns are compared by
    position, numbers by 9 significant digits, and texts without surrounding whitespace.

    Returns:
        True if the rows are the same. False if not, or if the prediction fails or takes longer than `seconds`. None if
        the reference returns no row or only NULL, because then every query without a result would match.

    Raises:
        JobError: the reference query fails, or the database is broken.
    """
    try:
        expected = run_query(database, reference, seconds, clock=clock)
    except QueryError as error:
        raise JobError(
            f"executionAccuracy: a reference query of the evaluation data fails in {database}: {error}: {reference!r}."
            " Remove or correct that row."
        ) from error
    if all(value is None for row in expected for value in row):
        return None
    try:
        # One row more than expected is enough to see that the results differ.
        actual = run_query(database, prediction, seconds, max_rows=len(expected) + 1, clock=clock)
    except QueryError:
        return False
    return Counter(map(_normalize_row, actual)) == Counter(map(_normalize_row, expected))


def run_query(
    database: Path,
    sql: str,
    seconds: float = QUERY_SECONDS,
    max_rows: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """The rows of one SELECT on a SQLite file. The file is opened read-only and must not change meanwhile.

    Args:
        database: the SQLite file.
        sql: the query.
        seconds: time limit.
        max_rows: rows to return at most; None returns all.
        clock: returns the time in seconds.

    Raises:
        QueryError: it is not a single valid SELECT, or takes longer than `seconds`.
    """
    deadline = clock() + seconds
    # `immutable` avoids file locks, which are unreliable on network file systems.
    uri = f"{database.absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_VALUE_BYTES)
            connection.text_factory = _decode
            connection.set_authorizer(_authorize)
            connection.set_progress_handler(lambda: clock() > deadline, _INSTRUCTIONS_PER_DEADLINE_CHECK)
            cursor = connection.execute(sql)
            return cursor.fetchall() if max_rows is None else cursor.fetchmany(max_rows)
    # sqlite3.Warning: two statements; ValueError: characters that are not allowed in a query.
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        reason = f"it took longer than {seconds:g} s" if clock() > deadline else str(error)
        raise QueryError(reason) from error


def _execution_accuracy(evaluation: EvaluationSpec) -> Metric:
    if evaluation.sql is None:
        raise JobError("training.evaluation.sql: executionAccuracy needs the folder of the <name>.sqlite databases.")
    sql = evaluation.sql

    def metric(prediction: str, reference: str, columns: Mapping[str, Any]) -> bool | None:
        return execution_match(prediction, reference, find_database(sql, columns))

    return metric


def find_database(sql: SqlSpec, columns: Mapping[str, Any]) -> Path:
    """The SQLite file for a row: `<sql.databases>/<name>.sqlite`, with the name from column `sql.column`.

    Raises:
        JobError: the row has no such column, or the folder has no such file.
    """
    name = columns.get(sql.column)
    if not isinstance(name, str):
        raise JobError(
            f"training.evaluation.sql.column: the evaluation rows have no text column {sql.column!r} "
            f"(they have {', '.join(sorted(columns)) or 'none'}). Add it to dataset.keep, and write the shards again."
        )
    database = Path(sql.databases, f"{name}.sqlite")
    if Path(name).name != name or not database.is_file():
        raise JobError(
            f"training.evaluation.sql.databases: there is no file {name}.sqlite in {sql.databases}; column "
            f"{sql.column!r} of an evaluation row names it."
        )
    return database


METRICS: Mapping[str, Callable[[EvaluationSpec], Metric]] = {
    "exactMatch": lambda evaluation: exact_match,
    "executionAccuracy": _execution_accuracy,
}


def build_metrics(evaluation: EvaluationSpec) -> dict[str, Metric]:
    """The job's metrics of generated answers, by metric name.

    Raises:
        JobError: a function of the user cannot be imported, or is not a function.
    """
    functions = {
        metric_name(metric): load_custom_metric(metric) for metric in evaluation.metrics if is_function(metric)
    }
    return {name: METRICS[name](evaluation) for name in evaluation.metrics if name in METRICS} | functions


def mean_score(scores: Sequence[float | None]) -> float | None:
    """Mean score of the rows that count (True is 1, False is 0); None if no row counts.

    The sum is exact before it is rounded, so the order of the rows does not matter.

    Raises:
        JobError: the sum exceeds the range of a float.
    """
    counted = [score for score in scores if score is not None]
    try:
        return math.fsum(counted) / len(counted) if counted else None
    except OverflowError as error:
        raise JobError(
            f"{FIELD}: the sum of a metric's values exceeds the range of a float: return smaller values"
        ) from error


def _authorize(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED_ACTIONS else sqlite3.SQLITE_DENY


def _decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


def _normalize_row(row: Row) -> Row:
    return tuple(_normalize_value(value) for value in row)


def _normalize_value(value: Value) -> Value:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    return value
