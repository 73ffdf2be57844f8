"""examples/t5-wikisql/convert.py turns the queries of the release into valid SQL."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from tests.examples.jobs import EXAMPLES
from tests.examples.wikisql import QUESTIONS, TABLES, write_release

SQL = [
    """SELECT "School/Club Team" FROM data WHERE "Player" = 'Antonio Lang'""",
    """SELECT COUNT("Player") FROM data WHERE "School/Club Team" = 'O''Hara'""",
    """SELECT AVG("Points") FROM data WHERE 2001 > "Year\"""",
    """SELECT MIN("Year") FROM data WHERE "Points" > 20.5 AND "Height 6'2"" or more" = 'yes'""",
    """SELECT "Year" FROM data""",
]
ANSWERS = [[("Duke",)], [(0,)], [(21.5,)], [(1999,)], [(1999,), (2001,)]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The training rows that the script writes."""
    release = write_release(tmp_path_factory.mktemp("release"))
    script = EXAMPLES / "t5-wikisql" / "convert.py"
    command = [sys.executable, str(script), "--data", str(release)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == [f"{split}: {len(QUESTIONS)} questions" for split in ("train", "dev", "test")]
    return [json.loads(line) for line in (release / "rows" / "train.jsonl").read_text().splitlines()]


def test_rows_have_question_and_column_names(rows: list[dict[str, str]]) -> None:
    assert [row["question"] for row in rows] == [asked["question"] for asked in QUESTIONS]
    assert rows[0]["columns"] == "Player | No. | School/Club Team"


def test_queries_have_no_less_than_sign(rows: list[dict[str, str]]) -> None:
    assert [row["sql"] for row in rows] == SQL
    assert not [query for query in SQL if "<" in query]


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_queries_run_on_a_database_with_the_table(number: int) -> None:
    table = next(table for table in TABLES if table["id"] == QUESTIONS[number]["table_id"])
    names = ", ".join('"' + name.replace('"', '""') + '"' for name in table["header"])
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"CREATE TABLE data ({names})")
        connection.executemany("INSERT INTO data VALUES (?, ?, ?)", table["rows"])
        assert connection.execute(SQL[number]).fetchall() == ANSWERS[number]
