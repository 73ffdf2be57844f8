"""From rows to a trained model: the file that `spotune init` writes is validated, planned and run unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from spotune.job_file.load import load_job
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from tests import ROOT
from tests.command_line import run_spotune
from tests.trainer.data.chat.support.conversations import assistant, tokenizer_with, user
from tests.trainer.support.labelled import save_model
from tests.trainer.support.tiny import save_config, save_source

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


POSITIONS = 4096


def save_llama(model: Path) -> None:
    """Save a model without weights."""
    save_source(model, "causal", max_position_embeddings=POSITIONS)


def save_pretrained_llama(model: Path) -> None:
    """Save random weights, which are then those that training starts from."""
    save_llama(model)
    LlamaForCausalLM(LlamaConfig.from_pretrained(model)).save_pretrained(model)


def save_chat_model(model: Path) -> None:
    """Save a model without weights whose tokenizer has a chat template."""
    save_config(model, "causal", vocab_size=512, max_position_embeddings=POSITIONS)
    tokenizer_with("trl/qwen3", "<|im_start|>", "<|im_end|>").save_pretrained(model)


def save_bert(model: Path) -> None:
    """Save an encoder with few positions."""
    save_model(model, "bert")


def save_t5(model: Path) -> None:
    """Save a seq2seq model without weights."""
    save_source(model, "seq2seq")


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
write_chats = write_derived(lambda _, row: {"messages": [user(row["question"]), assistant(row["answer"])]})
write_plain_text = write_derived(lambda _, row: {"text": row["answer"]})
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("write", "save", "objective", "fields"),
    [
        pytest.param(write_rows, save_llama, "sft", {"prompt", "completion"}, id="sft"),
        pytest.param(write_pairs, save_pretrained_llama, "dpo", {"chosen", "rejected"}, id="dpo", marks=LONG),
        pytest.param(write_texts, save_bert, "classification", {"text", "label"}, id="classification", marks=LONG),
        pytest.param(write_words, save_bert, "tokenClassification", {"text", "label"}, id="words", marks=LONG),
        pytest.param(write_judged, save_pretrained_llama, "kto", {"completion", "label"}, id="kto", marks=LONG),
        pytest.param(write_related, save_llama, "embedding", {"query", "positive"}, id="embedding", marks=LONG),
        pytest.param(write_chats, save_chat_model, "sft", {"messages"}, id="chats", marks=LONG),
        pytest.param(write_plain_text, save_llama, "sft", {"text", "packing"}, id="packed text", marks=LONG),
        pytest.param(write_rows, save_t5, "sft", {"prompt", "completion"}, id="seq2seq", marks=LONG),
        pytest.param(write_pairs, save_llama, "orpo", {"chosen", "rejected"}, id="orpo", marks=LONG),
    ],
)
def test_the_file_of_init_runs_unchanged(
    write: Callable[[Path], int],
    save: Callable[[Path], None],
    objective: str,
    fields: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = write(tmp_path / "docs.jsonl")
    save(tmp_path / "model")
    code, out, error = run_spotune(capsys, "init", "docs.jsonl", "--model", "model", "--name", "docs")
    assert code == 0, error
    written = Path("job.yaml").read_bytes()
    assert load_job("job.yaml").spec.training.objective == objective
    assert fields <= load_job("job.yaml").spec.dataset.model_fields_set

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
    if save is not save_bert:  # which has few positions
        assert counts["truncated"] <= rows / 100
    code, _, error = run_spotune(capsys, "report", "runs/docs", "--file", "report.html")
    assert code == 0, error
    assert "s by length in tokens" in Path("report.html").read_text()


@pytest.mark.long
def test_a_run_of_the_file_of_init_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = write_texts(tmp_path / "docs.jsonl")
    save_bert(tmp_path / "model")
    code, _, error = run_spotune(capsys, "init", "docs.jsonl", "--model", "model", "--name", "docs")
    assert code == 0, error
    code, _, error = run_spotune(capsys, "run", "job.yaml", "--output", "json")

    assert code == 0, error
    directory, spec = JobDirectory(tmp_path / "runs/docs"), load_job("job.yaml").spec
    result, records = json.loads(directory.result.read_text()), list(surviving_steps(directory))
    assert spec.training.epochs is not None
    assert spec.dataset.eval is not None
    assert spec.dataset.eval.fraction is not None
    samples_per_epoch = result["samples"] // spec.training.epochs
    assert samples_per_epoch == pytest.approx(rows * (1 - spec.dataset.eval.fraction), abs=1)
    steps_per_epoch = -(-samples_per_epoch // spec.training.global_batch_size)
    assert result["steps"] == len(records) == spec.training.epochs * steps_per_epoch > 10
    assert records[-1]["epoch"] == spec.training.epochs
    losses = [record["loss"] for record in records]
    assert mean(losses[-steps_per_epoch:]) < mean(losses[:steps_per_epoch])
    assert result["evalLoss"] is not None
    assert any(directory.export.glob("*.safetensors"))
