"""`spotune validate` on jobs with raw rows: what it checks, what it says it did not check, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.command_line import run_spotune
from tests.trainer.support.raw_rows import JOB
from tests.trainer.support.tiny import save_source, save_tokenizer

Row = dict[str, Any]

GOOD = {"q": "How many singers?", "a": "SELECT count(*) FROM singer"}
EMPTY = GOOD | {"a": ""}
ONE = "prepare: {source: rows.jsonl}"
MIXTURE = """mixture:
      - {name: good, prepare: {source: good.jsonl}}
      - {name: bad, prepare: {source: bad.jsonl}}
      - {name: old, train: {source: shards}, eval: {source: "s3://bucket/eval"}}"""


def write_job(data: str = ONE) -> None:
    Path("job.yaml").write_text(JOB.replace("DATA", data))


def write_rows(name: str, rows: Sequence[Row]) -> None:
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a job, and the model that it names."""
    monkeypatch.chdir(tmp_path)
    save_source(tmp_path / "model", "causal")
    write_job()
    return tmp_path


def validate(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    """What `spotune validate` prints of the rows of a job that it accepts."""
    code, out, error = run_spotune(capsys, "validate", "job.yaml", *words)
    assert (code, error) == (0, "")
    first, *others = out.splitlines()
    assert first == "job.yaml: valid (sql)"
    return [line.strip() for line in others]


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    """The problems of a job that `spotune validate` refuses."""
    code, out, error = run_spotune(capsys, "validate", "job.yaml", *words)
    assert (code, out) == (20, "")
    return error.splitlines()


def test_all_rows_of_a_small_file_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("rows.jsonl", [GOOD] * 7)
    assert validate(capsys) == ["spec.dataset.prepare.source: all 7 rows checked"]


def test_rows_that_would_be_left_out_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("rows.jsonl", [GOOD, GOOD | {"q": "why " * 600}])
    (problem,) = refusal(capsys)
    assert "rows.jsonl:2: nothing to learn is left within dataset.maxLength" in problem
    write_job(f"{ONE}\n    maxSkipped: 1")
    (line,) = validate(capsys)
    assert line.endswith("all 2 rows checked, 1 of them left out, as dataset.maxSkipped allows")


@pytest.mark.parametrize(("words", "line"), [
    ([], "the first 1,000 rows checked"),
    (["--rows", 2], "the first 2 rows checked"),
    (["--rows", 0], "rows not checked: --rows 0"),
])  # fmt: skip
def test_the_number_of_rows_is_limited(words: list[object], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("rows.jsonl", [*[GOOD] * 1000, EMPTY])
    assert validate(capsys, *words) == [f"spec.dataset.prepare.source: {line}"]
    (problem,) = refusal(capsys, "--rows", "all")
    assert f"{Path.cwd()}/rows.jsonl:1001: the completion is empty" in problem


@pytest.mark.parametrize("rows", ["-1", "some", "1.5", ""])
def test_a_number_of_rows_that_is_none_is_refused(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run_spotune(capsys, "validate", "job.yaml", f"--rows={rows}")
    assert (code, error) == (2, f"--rows {rows}: expected a whole number, or all.\n")


def test_bad_rows_are_named_with_the_field_of_the_job_and_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("rows.jsonl", [GOOD, EMPTY, GOOD, {"q": "Why?"}])
    place = "job.yaml:9: spec.dataset.prepare.source: " + str(Path.cwd() / "rows.jsonl")
    assert refusal(capsys) == [
        f"{place}:2: the completion is empty: remove the row, or correct it or dataset.completion",
        f"{place}:4: no column 'a'; the row has 'q': correct the row, or dataset.completion of the job",
    ]


def test_many_bad_rows_are_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("rows.jsonl", [EMPTY] * 9)
    *rows, last = refusal(capsys)
    assert len(rows) == 5
    assert last == "job.yaml:9: spec.dataset.prepare.source: has 5 problems in its first 5 rows: reading ended"


def test_problems_of_all_sources_of_a_mixture_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    write_job(MIXTURE)
    write_rows("good.jsonl", [GOOD, EMPTY])
    Path("bad.jsonl").write_text('{"q": "How many?", "a"')
    first, second = refusal(capsys)
    assert first.startswith("job.yaml:10: spec.dataset.mixture[0].prepare.source: ")
    assert "good.jsonl:2: the completion is empty" in first
    assert second.startswith("job.yaml:11: spec.dataset.mixture[1].prepare.source: ")
    assert "if it was cut short, copy it again" in second


def test_a_missing_source_of_a_mixture_is_refused_if_another_one_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    write_job(MIXTURE)
    write_rows("good.jsonl", [GOOD])
    (problem,) = refusal(capsys)
    source = Path.cwd() / "bad.jsonl"
    assert problem.startswith(
        f"job.yaml:11: spec.dataset.mixture[1].prepare.source: no file or folder matches {source}: correct the path"
    )


def test_what_is_not_checked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    write_job(MIXTURE)
    assert validate(capsys) == [
        f"spec.dataset.mixture[0].prepare.source: rows not checked: {Path.cwd()}/good.jsonl is not on this machine",
        f"spec.dataset.mixture[1].prepare.source: rows not checked: {Path.cwd()}/bad.jsonl is not on this machine",
        "spec.dataset.mixture[2].train.source: rows not checked: shards have no raw rows",
        "spec.dataset.mixture[2].eval.source: rows not checked: shards have no raw rows",
    ]


@pytest.mark.parametrize("path", ["/data/questions/*.jsonl", "elsewhere/rows.jsonl"])
def test_a_path_that_exists_in_the_cluster_only_is_not_checked(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(f'prepare: {{source: "{path}"}}')
    (line,) = validate(capsys)
    assert line.endswith(f"{path} is not on this machine")


def test_a_pattern_and_a_folder_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    write_rows("data/1.jsonl", [GOOD] * 3)
    write_rows("data/2.jsonl", [GOOD] * 4)
    for source in ("data", "data/*.jsonl", "data/**/*.jsonl"):
        write_job(f'prepare: {{source: "{source}"}}')
        assert validate(capsys) == ["spec.dataset.prepare.source: all 7 rows checked"]


def test_paths_begin_at_the_job_file(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("rows.jsonl", [GOOD])
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    code, out, _ = run_spotune(capsys, "validate", "../job.yaml")
    assert code == 0
    assert out.endswith("all 1 rows checked\n")


def test_json_says_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    write_job(MIXTURE.replace("bad.jsonl", "s3://bucket/rows.jsonl"))
    write_rows("good.jsonl", [GOOD] * 3)
    code, out, _ = run_spotune(capsys, "validate", "job.yaml", "--rows", 2, "--output", "json")
    assert code == 0
    good, bad, *shards = json.loads(out)["rows"]
    assert good == {
        "field": "spec.dataset.mixture[0].prepare.source",
        "source": str(Path.cwd() / "good.jsonl"),
        "checked": 2,
        "complete": False,
        "leftOut": 0,
    }
    assert bad == {
        "field": "spec.dataset.mixture[1].prepare.source",
        "source": "s3://bucket/rows.jsonl",
        "checked": 0,
        "notChecked": "they are in a store, which --stores reads",
    }
    assert len(shards) == 2


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing: standard error is what the test reads."""


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """URL of a web server with the files of a folder `web`."""
    (tmp_path / "web").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=tmp_path / "web")) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_rows_in_stores_are_checked_if_asked(
    web: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTUNE_CACHE", str(Path.cwd() / "cache"))
    write_job(f'prepare: {{source: "{web}/rows.jsonl"}}')
    write_rows("web/rows.jsonl", [GOOD, EMPTY])
    (line,) = validate(capsys)
    assert line.endswith("rows not checked: they are in a store, which --stores reads")
    (problem,) = refusal(capsys, "--stores")
    assert f"{web}/rows.jsonl:2: the completion is empty" in problem
    assert validate(capsys, "--stores", "--rows", 1) == ["spec.dataset.prepare.source: the first 1 rows checked"]
    Path("web/rows.jsonl").unlink()
    (problem,) = refusal(capsys, "--stores")
    assert f"{web}/rows.jsonl" in problem


def test_a_tokenizer_that_is_not_here_leaves_rows_unchecked(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("rows.jsonl", [EMPTY])
    Path("job.yaml").write_text(Path("job.yaml").read_text().replace("source: model", "source: /data/models/llama"))
    model, rows = validate(capsys)
    assert "spec.model.source: not checked: /data/models/llama is not on this machine (" in model
    assert rows.endswith("rows not checked: /data/models/llama, which has the tokenizer, is not on this machine")


def test_a_hub_that_cannot_be_reached_leaves_rows_unchecked() -> None:
    write_rows("rows.jsonl", [EMPTY])
    Path("job.yaml").write_text(JOB.replace("source: model", "source: hf://acme/llama").replace("DATA", ONE))
    program = [sys.executable, "-c", "from spotune.cli.main import main; main()", "validate", "job.yaml"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path.cwd() / "hub")}
    ran = subprocess.run(program, capture_output=True, text=True, check=True, env=environment)
    assert (
        "rows not checked: model.source: the Hugging Face Hub could not be reached for 'hf://acme/llama'" in ran.stdout
    )


def test_a_tokenizer_without_end_of_text_token_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = save_tokenizer(Path("model"))
    tokenizer.eos_token = None
    tokenizer.save_pretrained("model")
    write_rows("rows.jsonl", [GOOD])
    (problem,) = refusal(capsys)
    assert problem.startswith("job.yaml:5: spec.model.source: the tokenizer of ")
    assert "has no end-of-text token (eos_token)" in problem


def test_a_tokenizer_without_chat_template_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    job = Path("job.yaml").read_text().replace('prompt: "{q}"', "messages: chat").replace('    completion: "{a}"\n', "")
    Path("job.yaml").write_text(job)
    write_rows("rows.jsonl", [{"chat": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}])
    (problem,) = refusal(capsys)
    assert problem.startswith("job.yaml:6: spec.dataset: messages need a tokenizer with a chat template")


def test_without_the_trainer_rows_are_not_checked() -> None:
    write_rows("rows.jsonl", [EMPTY])
    program = "import sys; sys.modules['transformers'] = None; from spotune.cli.main import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", program, "validate", "job.yaml"], capture_output=True, text=True, check=True
    )
    needed = "spotune validate needs the Python package transformers, which is not installed"
    remedy = "pip install 'spotune[trainer]'"
    assert ran.stdout.splitlines()[1] == f"  spec.dataset.prepare.source: rows not checked: {needed}: {remedy}"
