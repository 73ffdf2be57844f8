"""From rows to a trained model: the file that `spotune init` writes is validated, planned and run unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from spotune_trainer.job_directory.layout import JobDirectory
from tests import ROOT
from tests.command_line import run_spotune
from tests.trainer.support.tiny import save_source

pytestmark = pytest.mark.ray

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


def test_the_file_of_init_runs_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path / "docs.jsonl")
    save_source(tmp_path / "model", "causal", max_position_embeddings=4096)
    code, out, error = run_spotune(capsys, "init", "docs.jsonl", "--model", "model", "--name", "docs")
    assert code == 0, error
    written = Path("job.yaml").read_bytes()

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
    assert counts["truncated"] <= rows / 100
    code, _, error = run_spotune(capsys, "report", "runs/docs", "--file", "report.html")
    assert code == 0, error
    assert "Rows by length in tokens" in Path("report.html").read_text()
