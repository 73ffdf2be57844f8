"""`spotune shard` as people and scripts use it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from spotune.cli.main import main
from spotune_trainer.data.shards import ShardedDataset
from tests.trainer.support.tiny import save_tokenizer

ROWS = [{"question": f"how many {n}", "sql": f"select {n}", "database": "singers"} for n in range(60)]
TEMPLATES = ["--task", "seq2seq", "--prompt", "{question}", "--completion", "{sql}", "--keep", "database"]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with rows and a tokenizer in it."""
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shard(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["shard", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def read(folder: Path) -> list[dict[str, Any]]:
    dataset = ShardedDataset(str(folder), folder / "cache")
    return [dataset[number] for number in range(len(dataset))]


def test_options_alone_are_enough(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rows.jsonl", "--directory", "out", "--tokenizer", "tokenizer", *TEMPLATES, "--eval-fraction", "0.2"]
    assert shard(*words) == 0
    shown = capsys.readouterr()
    assert "out is written\n" in shown.out
    assert "tokenizing: 100 % (part 1 of 1, 60 rows)" in shown.err
    assert len(read(workplace / "out" / "train")) + len(read(workplace / "out" / "eval")) == 60
    assert read(workplace / "out" / "eval")[0]["database"] == "singers"
    assert shard(*words, "--output", "json") == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["reused"]
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["eval"]["documents"] == 60


def test_a_job_file_gives_the_missing_options(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = workplace / "job"
    folder.mkdir()
    (folder / "job.yaml").write_text(
        """
        apiVersion: spotune.dev/v1alpha1
        kind: FinetuneJob
        metadata: {name: tiny}
        spec:
          model: {source: ../tokenizer, task: seq2seq}
          dataset:
            prompt: "{question}"
            completion: "{sql}"
            maxLength: 4
            prepare: {source: ../rows.jsonl}
          training: {epochs: 1}
        """
    )
    assert shard("--job", "job/job.yaml", "--directory", "out", "--completion", "{database}") == 0
    samples = read(workplace / "out")
    assert {sample["completion"] for sample in samples} == {"singers"}
    assert max(len(sample["input_ids"]) for sample in samples) == 4
    assert "raise maxLength" in capsys.readouterr().out


def test_packed_pairs_are_reported_with_the_padding_that_they_save(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    templates = ["--task", "causal", "--prompt", "{question}", "--chosen", "{sql}", "--rejected", "no {sql}"]
    words = [*templates, "--max-length", "64", "--packing", "--eval-fraction", "0.2"]
    assert shard("rows.jsonl", "--directory", "out", "--tokenizer", "tokenizer", *words) == 0
    shown = {line.strip("│ ").split("│")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    counts = json.loads((workplace / "out" / "manifest.json").read_text())["splits"]
    assert counts["train"]["pairs"] == counts["train"]["documents"] > 3 * counts["train"]["samples"]
    assert re.findall(r"[\d.%]+", shown["pairs in packed rows"]) == [str(counts["train"]["pairs"])]
    [share] = re.findall(r"[\d.]+%", shown["padding without packing"])
    assert share == f"{counts['train']['unpackedPadding']:.1%}"
    assert "pairs" not in counts["eval"], "pairs that are held out keep rows of their own"
    assert all("pair_lengths" in row for row in read(workplace / "out" / "eval"))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["rows.jsonl", *TEMPLATES], 2, "--tokenizer, or --job"),
        (["rows.jsonl", "--tokenizer", "tokenizer"], 2, "the columns to learn are missing"),
        (["--tokenizer", "tokenizer", *TEMPLATES], 2, "give the files to read"),
        (["rows.jsonl", "--job", "absent.yaml"], 2, "absent.yaml"),
        (["rows.jsonl", "--tokenizer", "absent", *TEMPLATES], 20, "no folder 'absent'"),
        (["absent.jsonl", "--tokenizer", "tokenizer", *TEMPLATES], 20, "absent.jsonl"),
        (["rows.jsonl", "--tokenizer", "tokenizer", "--text", "body"], 20, "rows.jsonl:1: no column 'body'"),
        (["rows.jsonl", "--tokenizer", "tokenizer", "--text", "body{"], 20, "unmatched {"),
        (["rows.jsonl", "--tokenizer", "tokenizer", *TEMPLATES, "--packing"], 20, "packing"),
        (["rows.jsonl", "--tokenizer", "tokenizer", *TEMPLATES, "--text", "body"], 20, "set only one of"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(
    workplace: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    assert shard(*words, "--directory", "out", "--output", "json") == code
    error = json.loads(capsys.readouterr().err)
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert sorted(path.name for path in workplace.iterdir()) == ["rows.jsonl", "tokenizer"]


def test_the_turns_of_chats_are_reported_by_outcome(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [
        {"role": "user", "content": "how many"},
        {"role": "assistant", "content": "ten", "weight": 0},
        {"role": "user", "content": "select"},
        {"role": "assistant", "content": "count"},
    ]
    (workplace / "chats.jsonl").write_text(json.dumps({"chat": chat}) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(workplace / "tokenizer")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(workplace / "tokenizer")
    words = ["chats.jsonl", "--directory", "out", "--tokenizer", "tokenizer", "--messages", "chat"]
    assert shard(*words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"turns trained on .* 1 ", shown)
    assert re.search(r"turns left out: marked by train or weight .* 1 ", shown)
    assert shard(*words, "--train-on", "last", "--overwrite", "--output", "json") == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["splits"]["train"]["turns"] == {"flagged": 1, "trained": 1}
    assert manifest["options"]["text"]["trainOn"] == "last"


def test_generation_marks_that_cover_the_prompt_are_a_warning(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "ten"}]
    (workplace / "chats.jsonl").write_text(json.dumps({"chat": chat}) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(workplace / "tokenizer")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}user: {{ m.content }}</s>{% else %}"
        "{% generation %}assistant: {{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(workplace / "tokenizer")
    words = ["chats.jsonl", "--directory", "out", "--tokenizer", "tokenizer", "--messages", "chat"]
    assert shard(*words) == 0
    assert "tokenizer cover 'assistant: ', which the prompt already has" in capsys.readouterr().out
    assert "warnings" in json.loads((workplace / "out" / "manifest.json").read_text())


MIXTURE = """
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {name: tiny}
spec:
  model: {source: tokenizer, task: seq2seq}
  dataset:
    prompt: "{question}"
    completion: "{sql}"
    mixture:
      - {name: all, prepare: {source: rows.jsonl}}
      - {name: few, prepare: {source: few.csv}, weight: null}
      - {name: ready, train: {source: ready}}
  training: {epochs: 1}
"""


@pytest.fixture
def mixture(workplace: Path) -> Path:
    """A job with a source of JSON lines, one of CSV, and one of shards."""
    (workplace / "few.csv").write_text("question,sql\nhow many,select 1\nhow long,select 2\n")
    (workplace / "job.yaml").write_text(MIXTURE.replace(", weight: null", ""))
    return workplace


def test_the_sources_of_a_mixture_get_folders_and_a_total(mixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shard("--job", "job.yaml", "--directory", "out") == 0
    shown = capsys.readouterr()
    assert [len(read(mixture / "out" / name)) for name in ("all", "few")] == [60, 2]
    assert "tokenizing few: 100 %" in shown.err
    table = [re.findall(r"[\w,]+", line) for line in shown.out.splitlines()]
    assert ["all", "60", "60"] in [cells[:3] for cells in table]
    assert ["few", "2", "2"] in [cells[:3] for cells in table]
    assert ["all", "62", "62"] in [cells[:3] for cells in table]
    assert shard("--job", "job.yaml", "--directory", "out", "--output", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: (each["reused"], each["directory"]) for name, each in found["sources"].items()} == {
        name: (True, str(mixture / "out" / name)) for name in ("all", "few")
    }


def test_one_source_of_a_mixture(mixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shard("--job", "job.yaml", "--source", "few", "--directory", "out") == 0
    assert [path.name for path in (mixture / "out").iterdir()] == ["few"]
    for name, problem in {
        "ready": "dataset.mixture: source ready has shards, which hold no raw rows: give one with prepare",
        "other": "--source other: the job has all, few, ready",
    }.items():
        assert shard("--job", "job.yaml", "--source", name, "--directory", "out") == 2
        assert problem in " ".join(capsys.readouterr().err.split())


def test_an_error_in_a_source_of_a_mixture_names_its_file(mixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mixture / "few.csv").write_text("question,sql\nhow many,select 1\nhow long\n")
    assert shard("--job", "job.yaml", "--directory", "out") == 20
    shown = " ".join(capsys.readouterr().err.split())
    assert "dataset.mixture, source few: " in shown
    assert "few.csv:3: 1 field, but the header names 2 columns" in shown
    (mixture / "few.csv").unlink()
    assert shard("--job", "job.yaml", "--directory", "out") == 20
    assert re.search(r"dataset\.mixture, source few: .*few\.csv", " ".join(capsys.readouterr().err.split()))


def test_a_tokenizer_without_an_end_of_text_token_is_refused(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(workplace / "tokenizer")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(workplace / "tokenizer")
    assert shard("rows.jsonl", "--tokenizer", "tokenizer", *TEMPLATES, "--directory", "out") == 20
    shown = " ".join(capsys.readouterr().err.split())
    assert "model.tokenizer: the tokenizer of" in shown
    assert "has no end-of-text token (eos_token)" in shown


def test_a_tokenizer_without_a_padding_token_makes_the_same_shards(workplace: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(workplace / "tokenizer")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(workplace / "without")
    for name in ("tokenizer", "without"):
        assert shard("rows.jsonl", "--tokenizer", name, *TEMPLATES, "--directory", f"from-{name}") == 0
    first, second = (sorted((workplace / f"from-{name}").glob("*.mds")) for name in ("tokenizer", "without"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
