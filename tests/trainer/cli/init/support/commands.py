"""`spotune init` on rows that a test writes, and what its job file makes of them."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from spotune.job import FinetuneJob
from spotune.job_file.load import load_job, resolve_paths
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.models.pretrained import load_tokenizer
from tests.command_line import run_spotune

Row = dict[str, Any]


def write(rows: Sequence[Row], name: str = "rows.jsonl") -> str:
    """Write rows in the format of the file's name, and return the name."""
    path = Path(name)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return name


def init(capsys: pytest.CaptureFixture[str], *words: object) -> FinetuneJob:
    """Run `spotune init`, and load the file that it wrote."""
    code, _, error = run_spotune(capsys, "init", *words)
    assert code == 0, error
    return load_job("job.yaml")


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code and message of `spotune init`, which writes no file."""
    code, out, error = run_spotune(capsys, "init", *words)
    assert out == ""
    assert not Path("job.yaml").exists()
    return code, error


def prepared(job: FinetuneJob) -> dict[str, Any]:
    """The counts of the shards that the job makes of its rows."""
    job = resolve_paths(job, Path.cwd())
    assert job.spec.dataset.prepare is not None
    options = PrepareOptions.from_job(job)
    source = job.spec.dataset.prepare.source
    counts: dict[str, Any] = prepare([source], Path.cwd() / "shards", options, load_tokenizer(job)).manifest["splits"][
        "train"
    ]
    return counts


def ask(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """Give these answers to the questions of `--interactive`, each on a line of its own."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{answer}\n" for answer in answers)))
