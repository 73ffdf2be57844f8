"""Built-in metrics: which answers count as correct."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from spotune.errors import JobError
from spotune.job import EvaluationSpec, SqlSpec
from spotune_trainer.evaluation.metrics import (
    METRICS,
    QueryError,
    build_metrics,
    exact_match,
    execution_match,
    mean_score,
    run_query,
)

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "concert.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE singer (name TEXT, age INTEGER, rating REAL)")
        rows = [("Ann", 30, 0.1), ("Bob ", 41, 0.3), ("Ann", 30, 0.2), ("Eve", None, None)]
        connection.executemany("INSERT INTO singer VALUES (?, ?, ?)", rows)
        connection.commit()
    return path


@pytest.mark.parametrize(
    ("prediction", "reference", "same"),
    [
        ("SELECT 1", "SELECT 1", True),
        ("  SELECT\n\t1 ", "SELECT 1", True),
        ("select 1", "SELECT 1", False),
        ("SELECT 1;", "SELECT 1", False),
        ("", "SELECT 1", False),
        ("SELECT1", "SELECT 1", False),
    ],
)
def test_exact_match_ignores_only_the_amount_of_whitespace(prediction: str, reference: str, same: bool) -> None:
    assert exact_match(prediction, reference) is same


@pytest.mark.parametrize(
    ("prediction", "reference", "verdict"),
    [
        ("SELECT count(*) FROM singer", "SELECT count(name) FROM singer", True),
        ("SELECT name FROM singer ORDER BY name DESC", "SELECT name FROM singer ORDER BY name", True),
        ("SELECT DISTINCT name FROM singer", "SELECT name FROM singer", False),
        ("SELECT name FROM singer UNION ALL SELECT name FROM singer", "SELECT name FROM singer", False),
        ("SELECT age, name FROM singer", "SELECT name, age FROM singer", False),
        ("SELECT 0.1 + 0.2", "SELECT 0.3", True),
        ("SELECT 30.0", "SELECT age FROM singer LIMIT 1", True),
        ("SELECT '30'", "SELECT 30", False),
        ("SELECT 'Bob'", "SELECT name FROM singer WHERE age > 40", True),
        ("SELECT 123456788", "SELECT 123456789", False),
        ("SELECT age FROM singer WHERE name = 'Eve'", "SELECT age FROM singer WHERE name = 'Eve'", None),
        ("SELECT 1", "SELECT name FROM singer WHERE age > 99", None),
        ("SELECT max(age) FROM singer WHERE age > 99", "SELECT max(age) FROM singer WHERE age > 99", None),
        ("SELECT count(*) FROM singer WHERE age > 99", "SELECT count(*) FROM singer WHERE age > 99", True),
        ("SELECT name FROM", "SELECT 1", False),
        ("SELECT nope FROM singer", "SELECT 1", False),
        ("", "SELECT 1", False),
        ("SELECT 1; SELECT 1", "SELECT 1", False),
        ("SELECT '\ud800'", "SELECT 1", False),
        ("SELECT\0 1", "SELECT 1", False),
        ("SELECT randomblob(2000000000)", "SELECT 1", False),
    ],
)
def test_execution_match_compares_rows_as_multisets(
    database: Path, prediction: str, reference: str, verdict: bool | None
) -> None:
    assert execution_match(prediction, reference, database) is verdict


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM singer",
        "DROP TABLE singer",
        "INSERT INTO singer VALUES ('Max', 1, 1)",
        "ATTACH DATABASE '{folder}/stolen.sqlite' AS stolen",
        "PRAGMA user_version = 7",
        "VACUUM INTO '{folder}/copy.sqlite'",
    ],
)
def test_a_predicted_query_cannot_write(database: Path, query: str) -> None:
    before = database.read_bytes()
    assert execution_match(query.format(folder=database.parent), "SELECT count(*) FROM singer", database) is False
    assert database.read_bytes() == before
    assert [path.name for path in database.parent.iterdir()] == ["concert.sqlite"]


def test_an_endless_predicted_query_is_wrong_after_the_time_limit(database: Path) -> None:
    started = time.monotonic()
    assert execution_match(ENDLESS, "SELECT 1", database, seconds=0.2) is False
    assert time.monotonic() - started < 5


def test_the_time_limit_uses_the_given_clock(database: Path) -> None:
    ticks = iter(range(1000))
    with pytest.raises(QueryError, match="longer than 5 s"):
        run_query(database, ENDLESS, 5.0, clock=lambda: float(next(ticks)))
    assert next(ticks) < 20


def test_only_one_row_more_than_expected_is_read(database: Path) -> None:
    assert len(run_query(database, f"{ENDLESS.replace('count(*)', 'i')}", max_rows=5)) == 5


@pytest.mark.parametrize("reference", ["SELECT nope FROM singer", ENDLESS])
def test_a_failing_reference_query_is_a_job_error(database: Path, reference: str) -> None:
    with pytest.raises(JobError, match=r"reference query of the evaluation data fails in .*concert.sqlite"):
        execution_match("SELECT 1", reference, database, seconds=0.1)


def test_a_damaged_database_is_a_job_error(tmp_path: Path) -> None:
    (tmp_path / "broken.sqlite").write_text("this is no database, but it is long enough to be read as one " * 20)
    with pytest.raises(JobError, match="file is not a database"):
        execution_match("SELECT 1", "SELECT name FROM singer", tmp_path / "broken.sqlite")


def test_execution_accuracy_uses_the_database_of_the_row(database: Path) -> None:
    evaluation = EvaluationSpec(
        generate=True,
        metrics=["loss", "exactMatch", "executionAccuracy"],
        sql=SqlSpec(databases=str(database.parent), column="db"),
    )
    metrics = build_metrics(evaluation)
    assert list(metrics) == ["exactMatch", "executionAccuracy"] == list(METRICS)
    query, same = "SELECT count(*) FROM singer", "SELECT count(age) + 1 FROM singer"
    assert metrics["exactMatch"](query, same, {}) is False
    assert metrics["executionAccuracy"](query, same, {"db": "concert"}) is True


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, r"no text column 'db' \(they have none\).*dataset.keep"),
        ({"database": "concert"}, r"no text column 'db' \(they have database\)"),
        ({"db": "opera"}, "no file opera.sqlite"),
        ({"db": "../concert"}, r"no file \.\./concert.sqlite"),
    ],
)
def test_a_row_without_its_database_is_an_error(database: Path, columns: dict[str, str], message: str) -> None:
    sql = SqlSpec(databases=str(database.parent), column="db")
    metric = METRICS["executionAccuracy"](EvaluationSpec(generate=True, metrics=["executionAccuracy"], sql=sql))
    with pytest.raises(JobError, match=message):
        metric("SELECT 1", "SELECT 1", columns)


def test_rows_that_do_not_count_are_not_in_the_mean() -> None:
    assert mean_score([True, False, None, True, None, True]) == 0.75
    assert mean_score([None, None]) is None
    assert mean_score([]) is None
