"""The corpus of examples/text-to-sql: reproducible, varied, correct, and without leaks from training to evaluation."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from spotune.job_file.load import load_job
from tests import ROOT

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "text-to-sql"
TRAINING_ROWS = 4000
VALUE = re.compile(r"[=<>] ('[^']*'|\d+)")

Row = dict[str, str]


def load(name: str) -> ModuleType:
    """One of the example's scripts as a module."""
    spec = importlib.util.spec_from_file_location(f"text_to_sql_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_corpus(folder: Path, hash_seed: str) -> Path:
    """Run generate.py as a user does, with fewer questions."""
    command = [sys.executable, str(EXAMPLE / "generate.py"), "--output", str(folder)]
    command += ["--training-rows", str(TRAINING_ROWS)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": hash_seed})
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "data", "1")


def rows_of(corpus: Path, split: str) -> list[Row]:
    return [json.loads(line) for line in (corpus / f"{split}.jsonl").read_text().splitlines()]


def tables_of(corpus: Path, *, held_out: bool) -> list[tuple[list[str], list[tuple[Any, ...]]]]:
    """Header and rows of each table, either of training or of evaluation."""
    tables = []
    for path in sorted((corpus / "databases").glob("*.sqlite")):
        if ("held_out" in path.stem) == held_out:
            with closing(sqlite3.connect(path)) as connection:
                cursor = connection.execute("SELECT * FROM data")
                tables.append(([column[0] for column in cursor.description], cursor.fetchall()))
    return tables


def values_of(rows: list[Row]) -> set[str]:
    return {value.strip("'") for row in rows for value in VALUE.findall(row["sql"])}


def digests(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_same_seed_writes_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    again = write_corpus(tmp_path / "data", "2")
    assert digests(again) == digests(corpus)


def test_questions_come_from_two_hundred_templates(corpus: Path) -> None:
    assert len({row["template"] for row in rows_of(corpus, "train")}) >= 200


def test_all_aggregates_operators_and_condition_counts_occur(corpus: Path) -> None:
    for split in ("train", "eval"):
        queries = [row["sql"] for row in rows_of(corpus, split)]
        aggregates = {match.group(1) for query in queries if (match := re.search(r"(\w+)\(", query))}
        assert aggregates == {"MAX", "MIN", "COUNT", "SUM", "AVG"}
        assert {operator for query in queries for operator in re.findall(r" ([=<>]) ", query)} == {"=", "<", ">"}
        assert {query.count(" AND ") for query in queries} == {0, 1, 2}


def test_every_query_has_a_nonempty_result(corpus: Path) -> None:
    for row in [*rows_of(corpus, "train"), *rows_of(corpus, "eval")]:
        with closing(sqlite3.connect(corpus / "databases" / f"{row['database']}.sqlite")) as connection:
            result = connection.execute(row["sql"]).fetchall()
            header = [column[1] for column in connection.execute("PRAGMA table_info(data)")]
        assert result, row
        assert result not in ([(None,)], [(0,)]), row
        assert row["columns"].split() == header


def test_values_are_spelled_the_same_in_question_and_query(corpus: Path) -> None:
    for row in rows_of(corpus, "eval"):
        for value in values_of([row]):
            assert re.search(rf"\b{re.escape(value)}\b", row["question"]), row


def test_evaluation_shares_no_template_with_training(corpus: Path) -> None:
    training, evaluation = ({row["template"] for row in rows_of(corpus, split)} for split in ("train", "eval"))
    assert not training & evaluation
    templates = load("generate").TEMPLATES
    for kind, wordings in templates["evaluation"].items():
        assert not set(wordings) & set(templates["training"][kind]), kind


def test_evaluation_shares_no_table_and_no_header_with_training(corpus: Path) -> None:
    training, evaluation = rows_of(corpus, "train"), rows_of(corpus, "eval")
    assert not {row["database"] for row in training} & {row["database"] for row in evaluation}
    headers = [{frozenset(header) for header, _ in tables_of(corpus, held_out=held_out)} for held_out in (False, True)]
    assert not headers[0] & headers[1]


def test_evaluation_shares_no_value_with_training(corpus: Path) -> None:
    training = rows_of(corpus, "train")
    known = values_of(training) | {
        str(cell) for _, rows in tables_of(corpus, held_out=False) for row in rows for cell in row
    }
    assert not values_of(rows_of(corpus, "eval")) & known


def test_questions_are_unique(corpus: Path) -> None:
    for split in ("train", "eval"):
        rows = rows_of(corpus, split)
        assert len({(row["database"], row["question"]) for row in rows}) == len(rows)


def test_tokenizer_round_trips_questions_and_queries(corpus: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(corpus / "model")
    for row in rows_of(corpus, "eval"):
        for text in (row["sql"], row["question"]):
            tokens = tokenizer(text).input_ids
            assert tokens[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_value_has_the_same_tokens_in_question_and_query(corpus: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(corpus / "model")
    question = tokenizer("points of players from Ashford?", add_special_tokens=False).tokens()
    query = tokenizer("SELECT MAX(points) FROM data WHERE city = 'Ashford'", add_special_tokens=False).tokens()
    ashford = question[question.index("Ġfrom") + 1 : -1]
    assert query[-len(ashford) - 1 : -1] == ashford
    assert "Ġpoints" in query


def test_lengths_fit_the_job(corpus: Path) -> None:
    job = load_job(EXAMPLE / "finetunejob.yaml")
    tokenizer = AutoTokenizer.from_pretrained(corpus / "model")
    assert AutoConfig.from_pretrained(corpus / "model").vocab_size == len(tokenizer)
    for row in [*rows_of(corpus, "train"), *rows_of(corpus, "eval")]:
        assert len(tokenizer(f"{row['question']} | {row['columns']}").input_ids) <= job.spec.dataset.max_length
        assert len(tokenizer(row["sql"]).input_ids) <= job.spec.dataset.max_completion_length


def test_baseline_copies_columns_and_values_into_the_nearest_query() -> None:
    baseline = load("baseline")
    near = {
        "question": "What is the coach of the team whose city is Ashford and with wins above 120?",
        "columns": "team coach city wins",
        "sql": "SELECT coach FROM data WHERE city = 'Ashford' AND wins > 120",
    }
    far = {"question": "How many ships are there?", "columns": "ship crew", "sql": "SELECT COUNT(ship) FROM data"}
    asked = {
        "question": "What is the coach of the team whose region is Oakmere and with wins above 77?",
        "columns": "team region coach wins",
    }
    nearest = baseline.NearestQuestion([far, near])(asked["question"])
    assert nearest == near
    assert baseline.adapt(nearest, asked) == "SELECT coach FROM data WHERE region = 'Oakmere' AND wins > 77"


def test_baseline_accuracy_is_between_10_and_40_percent(corpus: Path) -> None:
    assert 0.1 < load("baseline").execution_accuracy(corpus) < 0.4
