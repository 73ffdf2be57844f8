"""How a generated answer is judged: pure functions of the prediction, the reference and the row's other columns.

A metric says True, False, a number (one of the user's own may), or None when the row does not count. `METRICS` lists
ours by their name in `training.evaluation.metrics`; `loss` is not among them, since it needs no answer.
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
from spotune.job.metric import is_function, metric_name
from spotune_trainer.evaluation.custom_metrics import FIELD, Metric, own_metric

Value = str | bytes | int | float | None
Row = tuple[Value, ...]

QUERY_SECONDS = 5.0
_INSTRUCTIONS_BETWEEN_LOOKS = 10_000  # of SQLite's virtual machine: well under a millisecond
_LARGEST_VALUE_BYTES = 10_000_000
_SIGNIFICANT_DIGITS = 9

# Reading is all a query may do: no ATTACH (which could create files), no PRAGMA, no writing.
_ALLOWED_ACTIONS = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)


class QueryError(Exception):
    """A query cannot be run, or not within its time."""


def exact_match(prediction: str, reference: str, columns: Mapping[str, Any] | None = None) -> bool:
    """Whether two texts are the same, case included, with runs of white space as one blank and none at the ends."""
    return prediction.split() == reference.split()


def execution_match(
    prediction: str,
    reference: str,
    database: Path,
    seconds: float = QUERY_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> bool | None:
    """Whether two SQL queries return the same rows of a SQLite file (execution accuracy, Zhong et al. 2017, WikiSQL).

    Rows are compared as multisets: their order does not count, how often each comes does; columns count by position.
    Numbers are equal when 9 significant digits are; texts when they are equal but for white space at the ends.

    Returns:
        False also for a prediction that does not run within `seconds`; None where the reference returns nothing (no
        row, or NULL only), since any query that finds nothing would pass.

    Raises:
        JobError: the database or the reference is broken.
    """
    try:
        expected = run_query(database, reference, seconds, clock=clock)
    except QueryError as error:
        raise JobError(
            f"executionAccuracy: a reference query of the evaluation data fails in {database}: {error}: {reference!r}."
            " Remove or repair that row."
        ) from error
    if all(value is None for row in expected for value in row):
        return None
    try:
        # One row more than expected is enough to know that they differ.
        found = run_query(database, prediction, seconds, most_rows=len(expected) + 1, clock=clock)
    except QueryError:
        return False
    return Counter(map(_normalised, found)) == Counter(map(_normalised, expected))


def run_query(
    database: Path,
    sql: str,
    seconds: float = QUERY_SECONDS,
    most_rows: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """The rows of one SELECT over a SQLite file that is opened for reading only, and taken not to change meanwhile.

    Raises:
        QueryError: it is not one valid SELECT, or takes longer than `seconds`.
    """
    deadline = clock() + seconds
    # `immutable` spares the locks that network file systems are bad at.
    uri = f"{database.absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_VALUE_BYTES)
            connection.text_factory = _decode
            connection.set_authorizer(_authorise)
            connection.set_progress_handler(lambda: clock() > deadline, _INSTRUCTIONS_BETWEEN_LOOKS)
            cursor = connection.execute(sql)
            return cursor.fetchall() if most_rows is None else cursor.fetchmany(most_rows)
    # sqlite3.Warning: two statements; ValueError: characters that no query can hold.
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        late = f"it took longer than {seconds:g} s" if clock() > deadline else str(error)
        raise QueryError(late) from error


def _execution_accuracy(evaluation: EvaluationSpec) -> Metric:
    if evaluation.sql is None:
        raise JobError(
            "training.evaluation.sql: executionAccuracy needs to know the folder of <name>.sqlite databases."
        )
    sql = evaluation.sql

    def judge(prediction: str, reference: str, columns: Mapping[str, Any]) -> bool | None:
        return execution_match(prediction, reference, find_database(sql, columns))

    return judge


def find_database(sql: SqlSpec, columns: Mapping[str, Any]) -> Path:
    """The SQLite file that a row names.

    Raises:
        JobError: the row has no such column, or there is no such file in the folder.
    """
    name = columns.get(sql.column)
    if not isinstance(name, str):
        raise JobError(
            f"training.evaluation.sql.column: the evaluation rows have no text column {sql.column!r} "
            f"(they have {', '.join(sorted(columns)) or 'none'}). List it in dataset.keep, and make the shards again."
        )
    database = Path(sql.databases, f"{name}.sqlite")
    if Path(name).name != name or not database.is_file():
        raise JobError(
            f"training.evaluation.sql.databases: there is no file {name}.sqlite in {sql.databases}, which column "
            f"{sql.column!r} of an evaluation row names."
        )
    return database


METRICS: Mapping[str, Callable[[EvaluationSpec], Metric]] = {
    "exactMatch": lambda evaluation: exact_match,
    "executionAccuracy": _execution_accuracy,
}


def build_metrics(evaluation: EvaluationSpec) -> dict[str, Metric]:
    """The metrics over generated answers that a job asks for, by the name that their figures go by.

    Raises:
        JobError: a function of the user's cannot be imported, or is none.
    """
    functions = {metric_name(metric): own_metric(metric) for metric in evaluation.metrics if is_function(metric)}
    return {name: METRICS[name](evaluation) for name in evaluation.metrics if name in METRICS} | functions


def mean_score(scores: Sequence[float | None]) -> float | None:
    """Mean over the rows that count, of True and False the share of True; None if none does.

    The sum is exact before it is rounded: the order of the rows does not matter.

    Raises:
        JobError: the sum is beyond what a float can hold.
    """
    counted = [score for score in scores if score is not None]
    try:
        return math.fsum(counted) / len(counted) if counted else None
    except OverflowError as error:
        raise JobError(f"{FIELD}: the sum of a metric's values is beyond all floats: return smaller ones") from error


def _authorise(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED_ACTIONS else sqlite3.SQLITE_DENY


def _decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


def _normalised(row: Row) -> Row:
    return tuple(_normalised_value(value) for value in row)


def _normalised_value(value: Value) -> Value:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    return value
