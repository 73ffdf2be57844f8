"""From rows to a trained model: the file that `spotune init` writes is validated, planned and run unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from spotune.job_file.load import load_job
from spotune_trainer.job_directory.layout import JobDirectory
from tests import ROOT
from tests.command_line import run_spotune
from tests.trainer.support.labelled import save_model
from tests.trainer.support.tiny import save_source

pytestmark = pytest.mark.ray

NUM_PAIRS = 120
SECTION = re.compile(r"^## (?P<title>.+)\n(?P<text>(?:(?!^## ).*\n)+)", re.MULTILINE)


def write_rows(file: Path) -> int:
    """Write the sections of the pages in docs as questions and answers; returns their number."""
    rows = [
        {"page": page.stem, "question": f"{page.stem}: {found['title']}?", "answer": found["text"].strip()[:600]}
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for found in SECTION.finditer(page.read_text())
        if found["text"].strip()
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return len(rows)


def write_pairs(file: Path) -> int:
    """Write the sections as preference pairs: the section of a page is better than that before it."""
    write_rows(file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    pairs = [
        {"question": row["question"], "chosen": row["answer"], "rejected": before["answer"]}
        for before, row in pairwise(rows)
        if row["answer"] != before["answer"]
    ]
    file.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs[:NUM_PAIRS]))
    return NUM_PAIRS


def save_weights(model: Path) -> None:
    """Save random weights, which are then those that training starts from."""
    LlamaForCausalLM(LlamaConfig.from_pretrained(model)).save_pretrained(model)


def write_derived(derive: Callable[[int, dict[str, str]], dict[str, Any]]) -> Callable[[Path], int]:
    """A function that writes rows derived from the sections."""

    def write(file: Path) -> int:
        count = write_rows(file)
        rows = [derive(n, json.loads(line)) for n, line in enumerate(file.read_text().splitlines())]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return count

    return write


write_texts = write_derived(
    lambda _, row: {"text": row["answer"], "label": "code" if "`" in row["answer"] else "prose"}
)
write_words = write_derived(
    lambda _, row: {
        "tokens": row["answer"].split(),
        "tags": ["B-CODE" if "`" in word else "O" for word in row["answer"].split()],
    }
)
write_judged = write_derived(lambda n, row: {**row, "liked": n % 3 > 0})
write_related = write_derived(lambda _, row: {"anchor": row["question"], "positive": row["answer"]})


@pytest.mark.parametrize(
    ("write", "objective"),
    [
        (write_rows, "sft"),
        (write_pairs, "dpo"),
        (write_texts, "classification"),
        pytest.param(write_words, "tokenClassification", marks=pytest.mark.long),
        pytest.param(write_judged, "kto", marks=pytest.mark.long),
        pytest.param(write_related, "embedding", marks=pytest.mark.long),
    ],
)
def test_the_file_of_init_runs_unchanged(
    write: Callable[[Path], int],
    objective: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = write(tmp_path / "docs.jsonl")
    if objective in ("classification", "tokenClassification"):
        save_model(tmp_path / "model", "bert")
    else:
        save_source(tmp_path / "model", "causal", max_position_embeddings=4096)
    if objective in ("dpo", "kto"):  # they need a model that answers
        save_weights(tmp_path / "model")
    code, out, error = run_spotune(capsys, "init", "docs.jsonl", "--model", "model", "--name", "docs")
    assert code == 0, error
    written = Path("job.yaml").read_bytes()
    assert load_job("job.yaml").spec.training.objective == objective

    for words in (["validate", "job.yaml"], ["plan", "job.yaml"]):
        assert run_spotune(capsys, *words)[0] == 0
    code, _, error = run_spotune(capsys, "run", "job.yaml", "--max-steps", 3, "--output", "json")

    assert code == 0, error
    assert Path("job.yaml").read_bytes() == written
    assert "spotune run job.yaml --directory runs/docs" in out
    directory = JobDirectory(tmp_path / "runs/docs")
    assert json.loads(directory.result.read_text())["steps"] == 3
    counts = json.loads(directory.data_manifest.read_text())["splits"]["train"]
    assert counts["documents"] == rows > 100
    if objective not in ("classification", "tokenClassification"):  # whose model has few positions
        assert counts["truncated"] <= rows / 100
    code, _, error = run_spotune(capsys, "report", "runs/docs", "--file", "report.html")
    assert code == 0, error
    assert "Rows by length in tokens" in Path("report.html").read_text()
