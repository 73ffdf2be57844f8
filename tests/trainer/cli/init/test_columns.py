"""Profiles of columns: kinds, gaps and scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from spotune.errors import JobError
from spotune_trainer.cli.init.columns import kind_of, profile_columns


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("text", "text"),
        (1, "number"),
        (0.5, "number"),
        (True, "boolean"),
        ({"en": "yes"}, "object"),
        ([1, 2.5], "numbers"),
        (["a", "b"], "texts"),
        (["a", 1], "list"),
        ([True], "list"),
        ([], "list"),
        ([{"role": "user", "content": "?"}], "chat"),
        ([{"role": "assistant", "content": "!"}], "answer"),
        ([{"from": "human", "value": "?"}], "chat"),
        ([{"from": "gpt", "value": "!"}], "answer"),
        ([{"from": "observation", "value": "!"}], "sharegpt"),
        ([{"id": 1}], "list"),
        ('[{"role": "user", "content": "?"}]', "chat"),
        ('[{"role": "user"', "text"),
        ("[1, 2]", "text"),
    ],
)
def test_kind_of_a_value(value: Any, kind: str) -> None:
    assert kind_of(value) == kind


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_the_first_row_without_a_value_is_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": 1, "b": "x"}, {"a": None, "b": ""}, {"a": 3, "b": "y", "late": "z"}, {"b": "z"}]
    count, columns = profile_columns(write(tmp_path / "rows.jsonl", rows))
    a, b, late = columns
    assert count == 4
    assert (a.rows, a.missing_at) == (2, f"{tmp_path}/rows.jsonl:2")
    assert (b.rows, b.empty, b.missing_at) == (4, 1, "")
    assert (late.rows, late.missing_at) == (1, f"{tmp_path}/rows.jsonl:1")


def test_scripts_of_letters_are_counted(tmp_path: Path) -> None:
    rows = [{"ru": "Сколько их? ok", "zh": "多少", "n": "12 + 3"}]
    _, (russian, chinese, numbers) = profile_columns(write(tmp_path / "rows.jsonl", rows))
    assert (russian.script, chinese.script, numbers.script) == ("Cyrillic", "CJK", "")


def test_values_are_counted_as_labels_name_them(tmp_path: Path) -> None:
    rows = [
        {"a": n % 2, "b": n % 2 == 0, "c": ["x", "y"], "d": str(n), "e": "long " * 20, "f": 0.5} for n in range(300)
    ]
    _, columns = profile_columns(write(tmp_path / "rows.jsonl", rows))
    assert {column.name: column.values for column in columns} == {
        "a": {"0": 150, "1": 150},
        "b": {"true": 150, "false": 150},
        "c": {"x": 300, "y": 300},
        "d": {},
        "e": {},
        "f": {},
    }


def test_columns_of_parquet_files_are_those_that_all_have(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([{"a": "x", "b": {"c": 1}}]), tmp_path / "1.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([{"a": "y", "b": {"c": 2}, "more": 1}]), tmp_path / "2.parquet")
    count, columns = profile_columns(str(tmp_path))
    assert (count, {column.name: column.kind for column in columns}) == (2, {"a": "text", "b": "object"})


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(JobError, match=r"rows\.jsonl:2: invalid JSON"):
        profile_columns(str(tmp_path / "rows.jsonl"))


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n")
    with pytest.raises(JobError, match=r"rows\.csv has no rows"):
        profile_columns(str(tmp_path / "rows.csv"))
