"""The preflight of a mixture: all sources exist and fit together, and none is repeated too often; without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune.job_file.load import replace_fields
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.admission import read_job
from spotune_trainer.supervisor.preflight.checks import checks_of
from spotune_trainer.supervisor.preflight.mixtures import check_mixture
from tests.api.support.job_files import JOB_FILE
from tests.trainer.support.runs import Runs
from tests.trainer.support.tiny import make_job

CHECK = """
import sys
from pathlib import Path
from spotune.job import FinetuneJob
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.mixtures import check_mixture
print(check_mixture(FinetuneJob.model_validate_json(sys.argv[1]), JobDirectory(Path("/nowhere"))))
assert not {"torch", "numpy"} & set(sys.modules), "there is no memory for them beside the head"
"""


@pytest.fixture
def job(runs: Runs, tmp_path: Path) -> Callable[..., FinetuneJob]:
    """A function that makes a job of two sources of 75 rows each, in `sql` and `chat` of the test's folder."""
    for name in ("sql", "chat"):
        shutil.copytree(runs.shards("seq2seq"), tmp_path / name)

    def make(chat: dict[str, Any] | None = None, **dataset: Any) -> FinetuneJob:
        mixture = [
            {"name": "sql", "train": {"source": str(tmp_path / "sql")}},
            {"name": "chat", **(chat or {"train": {"source": str(tmp_path / "chat")}})},
        ]
        return make_job("/model", dataset={"train": None, "eval": None, "mixture": mixture, **dataset})

    return make


def write_manifest(folder: Path, **text: Any) -> None:
    (folder / "manifest.json").write_text(json.dumps({"tokenizerHash": "abc", "options": {"text": text}}))


def test_each_source_passes_with_its_size(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    mixture = job(eval={"fraction": 0.1})
    done = subprocess.run([sys.executable, "-c", CHECK, mixture.model_dump_json()], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == (
        f"sql: {tmp_path}/sql has 75 samples in 8 shards; chat: {tmp_path}/chat has 75 samples in 8 shards\n"
    )


def test_the_check_of_the_data_is_that_of_the_mixture(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    assert checks_of(job(), JobDirectory(tmp_path / "job"))["data"].run().startswith("sql: ")


def test_a_missing_source_is_named_by_its_place(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    for chat, problem in (
        ({"train": {"source": str(tmp_path / "no")}}, r"mixture\[1\]\.train\.source: .*/no does not exist: upload it"),
        ({"train": {"source": str(tmp_path)}}, r"mixture\[1\]\.train\.source: .* is not a dataset of MDS shards"),
    ):
        with pytest.raises(JobError, match=rf"^spec\.dataset\.{problem}"):
            check_mixture(job(chat), JobDirectory(tmp_path / "job"))


def test_run_names_file_line_and_field_of_a_missing_source(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    mixture = "[{name: sql, train: {source: sql}},\n              {name: chat, prepare: {source: rows.jsonl}}]"
    file = tmp_path / "job.yaml"
    file.write_text(
        JOB_FILE.replace("hf://google-t5/t5-small", "sql").replace(
            "train: {source: shards/train}", f'mixture: {mixture}\n    prompt: "{{a}}"\n    completion: "{{b}}"'
        )
    )
    with pytest.raises(JobError) as raised:
        read_job(file, {})
    assert str(raised.value) == (
        f"{file}:8: spec.dataset.mixture[1].prepare.source: {tmp_path}/rows.jsonl does not exist"
    )


def test_raw_data_is_found_and_later_its_shards(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "how many?", "answer": "1"}\n')
    mixture = job({"prepare": {"source": str(rows)}}, prompt="{question}", completion="{answer}")
    directory = JobDirectory(tmp_path / "job")
    assert check_mixture(mixture, directory).endswith(
        f"chat: {rows} has 1 files of raw data (41 bytes); shards are made of them before the first step"
    )
    shutil.copytree(tmp_path / "chat", directory.data / "train" / "chat")
    assert check_mixture(mixture, directory).endswith("data/train/chat has 75 samples in 8 shards")


def test_sources_that_differ_are_refused(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    write_manifest(tmp_path / "sql", maxLength=256)
    write_manifest(tmp_path / "chat", maxLength=512)
    with pytest.raises(JobError, match=r"the sources sql and chat have another maxLength \(256 and 512\)"):
        check_mixture(job(), JobDirectory(tmp_path / "job"))


def test_a_source_that_would_be_repeated_too_often_is_refused(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    chat = {"train": {"source": str(tmp_path / "chat")}, "maxEpochs": 1}
    once = job(chat, eval={"fraction": 0.2})
    check_mixture(once, JobDirectory(tmp_path / "job"))
    with pytest.raises(JobError, match=r"spec\.dataset\.mixture: chat: the run .* needs 120 samples .* over its 60,"):
        check_mixture(replace_fields(once, {"spec.training.epochs": 2}), JobDirectory(tmp_path / "job"))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "S3_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket="bucket")
    yield client
    server.stop()


def test_manifests_in_a_bucket_are_compared(job: Callable[..., FinetuneJob], tmp_path: Path, bucket: Any) -> None:
    bucket.upload_file(str(tmp_path / "chat" / "index.json"), "bucket", "chat/train/index.json")
    mixture, directory = job({"train": {"source": "s3://bucket/chat/train"}}), JobDirectory(tmp_path / "job")
    write_manifest(tmp_path / "sql", maxLength=256)
    assert "s3://bucket/chat/train has 75 samples" in check_mixture(mixture, directory)
    write_manifest(tmp_path / "chat", maxLength=512)
    bucket.upload_file(str(tmp_path / "chat" / "manifest.json"), "bucket", "chat/manifest.json")
    with pytest.raises(JobError, match="the sources sql and chat have another maxLength"):
        check_mixture(mixture, directory)
