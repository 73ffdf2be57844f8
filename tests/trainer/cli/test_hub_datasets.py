"""Commands on a dataset of a Hub of our own: they read one configuration and split, and the shards name it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from spotune.errors import JobError
from spotune.job import PrepareSpec
from spotune.job_file.load import load_job, resolve_paths
from spotune_trainer.data.preparation.inputs import rows_in_order
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.sources import check_data
from tests.command_line import run_spotune
from tests.trainer.support.hub_datasets import hub_of_this_process
from tests.trainer.support.raw_rows import JOB
from tests.trainer.support.tiny import save_source

DATASET = "hf://datasets/me/rows"
CARD = """---
configs:
- config_name: en
  default: true
  data_files: [{split: train, path: en/a.jsonl}, {split: test, path: en/b.jsonl}]
- config_name: fr
  data_files: [{split: train, path: fr/c.jsonl}]
- config_name: all
  data_files: [fr/*, en/a*]
---
"""
COLUMNS = ["--tokenizer", "model", "--prompt", "{q}", "--completion", "{a}"]


def rows(word: str, number: int) -> bytes:
    return "".join(json.dumps({"q": f"{word} {n}?", "a": f"{n}"}) + "\n" for n in range(number)).encode()


FILES: Mapping[str, bytes] = {
    "README.md": CARD.encode(),
    "en/a.jsonl": rows("one", 30),
    "en/b.jsonl": rows("two", 3),
    "fr/c.jsonl": rows("trois", 4),
}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a model, and a Hub with the dataset."""
    monkeypatch.chdir(tmp_path)
    save_source(tmp_path / "model", "causal")
    with hub_of_this_process(FILES, tmp_path):
        yield tmp_path


def write_job(data: str) -> None:
    Path("job.yaml").write_text(JOB.replace("DATA", data))


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    code, out, error = run_spotune(capsys, *words)
    assert code == 0, error
    return out


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    code, _, error = run_spotune(capsys, *words)
    assert code == 20, error
    return " ".join(error.split())


def shard(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        run(capsys, "shard", *words, "--directory", "shards", "--processes", 1, "--output", "json")
    )
    return found


def test_shards_of_several_splits_are_refused_and_those_of_one_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    several = (
        "has the splits train, test of configuration en (other configurations: fr, all): set prepare.split (--split)"
    )
    assert several in refusal(capsys, "shard", DATASET, "--directory", "shards", *COLUMNS)
    manifest = shard(capsys, DATASET, "--split", "test", *COLUMNS)
    assert manifest["splits"]["train"]["documents"] == 3
    [source] = manifest["sources"]
    assert source["path"] == f"{DATASET}/en/b.jsonl"
    assert (source["config"], source["split"]) == ("en", "test")
    assert shard(capsys, DATASET, "--config", "en", "--split", "test", *COLUMNS)["reused"]
    assert "made from other input" in refusal(
        capsys, "shard", DATASET, "--config", "fr", "--directory", "shards", *COLUMNS
    )


@pytest.mark.parametrize(("config", "split"), [("", "train"), ("en", "test"), ("fr", ""), ("all", "train")])
def test_rows_are_those_of_load_dataset(config: str, split: str, tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    expected = load_dataset(
        str(tmp_path / "copy"), config or None, split=split or "train", cache_dir=str(tmp_path / "datasets")
    )
    source = PrepareSpec(source=DATASET, config=config, split=split)
    found = [row for _, _, row in rows_in_order([source], ["q", "a"])]
    assert [{"q": row["q"], "a": row["a"]} for row in found] == expected.to_list()
    assert len(found) in {30, 3, 4, 34}


def test_options_go_before_the_split_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    write_job(f'prepare: {{source: "{DATASET}", config: fr}}')
    assert shard(capsys, "--job", "job.yaml")["splits"]["train"]["documents"] == 4
    shown = run(capsys, "data", "show", 1, "--job", "job.yaml", "--config", "en", "--split", "test")
    assert f"{DATASET}/en/b.jsonl:1" in shown
    stats = run(capsys, "data", "stats", "--job", "job.yaml", "--output", "json")
    assert json.loads(stats)["rows"] == 4


def test_a_mixture_has_a_split_for_each_source(capsys: pytest.CaptureFixture[str]) -> None:
    write_job(
        "mixture:\n"
        f'      - {{name: en, prepare: {{source: "{DATASET}", config: en, split: train}}}}\n'
        f'      - {{name: fr, prepare: {{source: "{DATASET}", config: fr, split: train}}}}'
    )
    lines = run(capsys, "validate", "job.yaml", "--stores").splitlines()
    assert [line.strip() for line in lines[1:]] == [
        "spec.dataset.mixture[0].prepare.source: all 30 rows checked",
        "spec.dataset.mixture[1].prepare.source: all 4 rows checked",
    ]
    sources = shard(capsys, "--job", "job.yaml")["sources"]
    assert {name: found["splits"]["train"]["documents"] for name, found in sources.items()} == {"en": 30, "fr": 4}
    code, _, error = run_spotune(capsys, "data", "show", 1, "--job", "job.yaml", "--split", "test")
    assert code == 2
    assert "--config and --split are of one dataset: name the source of the job's mixture by --source" in error
    shown = run(capsys, "data", "show", 1, "--job", "job.yaml", "--source", "en", "--split", "test")
    assert f"{DATASET}/en/b.jsonl:1" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rows.jsonl", "--split", "train"], "rows.jsonl: --split is only for datasets on the Hugging Face Hub"),
        ([DATASET, "--split", "train[:1%]"], f"{DATASET}: --split 'train[:1%]' is not the name of a split"),
        ([f"{DATASET}/en/*", "--config", "en"], f"{DATASET}/en/*: --config cannot be combined with a pattern"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run_spotune(capsys, "shard", *words, "--directory", "shards", *COLUMNS)
    assert code == 2
    assert message in " ".join(error.split())


def test_validate_and_the_preflight_name_field_splits_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    write_job(f'prepare: {{source: "{DATASET}"}}')
    problem = refusal(capsys, "validate", "job.yaml", "--stores")
    assert problem.startswith("job.yaml:9: spec.dataset.prepare.source: hf://datasets/me/rows has the splits train, ")
    job = resolve_paths(load_job("job.yaml"), Path.cwd())
    with pytest.raises(JobError, match=r"^spec\.dataset\.prepare\.source: .* set prepare\.split \(--split\) to the"):
        check_data(job, JobDirectory(Path.cwd() / "run"))
    write_job(f'prepare: {{source: "{DATASET}", split: test}}')
    assert "all 3 rows checked" in run(capsys, "validate", "job.yaml", "--stores")
    job = resolve_paths(load_job("job.yaml"), Path.cwd())
    found = check_data(job, JobDirectory(Path.cwd() / "run"))
    assert found.startswith(f"{DATASET} (split test) has 1 files of raw data")


def test_init_writes_the_split_that_it_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert "set prepare.split (--split)" in refusal(capsys, "init", DATASET, "--model", "model")
    run(capsys, "init", DATASET, "--config", "en", "--split", "train", "--model", "model", *COLUMNS[2:])
    prepare = load_job("job.yaml").spec.dataset.prepare
    assert prepare is not None
    assert (prepare.source, prepare.config, prepare.split) == (DATASET, "en", "train")
    assert "all 30 rows checked" in run(capsys, "validate", "job.yaml", "--stores")
