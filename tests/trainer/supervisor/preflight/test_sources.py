"""Checks of what a job reads: the model with its tokenizer, and the data; without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.sources import check_data, read_model
from tests.trainer.support.runs import Runs
from tests.trainer.support.tiny import make_job, save_config, save_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
READ = """
import sys
from pathlib import Path
from spotune.job import FinetuneJob
from spotune.errors import SpotuneError
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight import sources
job = FinetuneJob.model_validate_json(sys.argv[1])
directory = JobDirectory(Path("/nowhere"))
for check in (lambda: sources.read_model(job).description, lambda: sources.check_data(job, directory)):
    try:
        print(check())
    except SpotuneError as error:
        print(f"{type(error).__name__}: {error}")
assert "torch" not in sys.modules, "there is no memory for it beside the head"
"""


# Models


def test_folder_with_a_model_passes_with_its_size(tmp_path: Path) -> None:
    found = read_model(make_job(save_source(tmp_path / "model", "seq2seq")))
    assert found.parameters is not None
    assert found.description == (
        f"{tmp_path}/model is a t5 model of {found.parameters.count / 1e6:.1f} million parameters, "
        "tokenized by tokenizer.json"
    )


def test_missing_folder_has_the_message_of_spotune_run(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=rf"spec\.model\.source: {tmp_path}/model does not exist: upload it, or correct the job"
    ):
        read_model(make_job(tmp_path / "model"))


@pytest.mark.parametrize(
    ("removed", "model", "reason"),
    [
        ("config.json", {}, r"is not a model: it has no config\.json"),
        ("tokenizer*", {}, r"spec\.model\.source: .* has no tokenizer"),
        ("", {"initialise": "pretrained"}, r"has no weights \(\*\.safetensors, \*\.bin\)"),
        ("", {"source": "s3://bucket/model"}, r"s3://bucket/model cannot be loaded: a model is named as hf://"),
    ],
)
def test_folder_with_a_part_of_a_model_fails(
    tmp_path: Path, removed: str, model: Mapping[str, str], reason: str
) -> None:
    source = save_source(tmp_path / "model", "seq2seq")
    for path in source.glob(removed) if removed else ():
        path.unlink()
    with pytest.raises(JobError, match=reason):
        read_model(make_job(source, model=model))


def test_tokenizer_can_have_its_own_source(tmp_path: Path) -> None:
    save_config(tmp_path / "model", "causal")
    save_source(tmp_path / "tokenizer", "seq2seq")
    found = read_model(make_job(tmp_path / "model", "causal", model={"tokenizer": str(tmp_path / "tokenizer")}))
    assert found.description.endswith("tokenized by tokenizer.json")


def test_size_of_an_unknown_model_type_is_unknown(tmp_path: Path) -> None:
    source = save_source(tmp_path / "model", "seq2seq")
    (source / "config.json").write_text('{"model_type": "mamba"}')
    found = read_model(make_job(source))
    assert (found.parameters, "of unknown size" in found.description) == (None, True)
    for text, reason in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        (source / "config.json").write_text(text)
        with pytest.raises(JobError, match=reason):
            read_model(make_job(source))


# The Hugging Face Hub


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's API that its client needs for one small model and one data set."""

    files: Mapping[str, bytes]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/me/tiny/tree/main"):
            names = ("config.json", "spiece.model", "onnx/model.bin")
            self._send(json.dumps([{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names]).encode())
        elif self.path in self.files:
            self._send(self.files[self.path])
        else:
            self._send(b"", 404)

    do_HEAD = do_GET  # noqa: N815 - the base class's way

    def _send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {
            "ETag": f'"{len(content)}"',
            "X-Repo-Commit": COMMIT,
            "Content-Length": len(content),
        }.items():
            self.send_header(name, str(value))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Hub on this machine; yields the environment of its clients."""
    save_config(tmp_path / "model", "seq2seq")
    index = {"version": 2, "shards": [{"format": "mds", "samples": 7}, {"format": "mds", "samples": 5}]}

    class Handler(Hub):
        files: Mapping[str, bytes] = {
            "/me/tiny/resolve/main/config.json": (tmp_path / "model" / "config.json").read_bytes(),
            "/datasets/me/rows/resolve/main/train/index.json": json.dumps(index).encode(),
        }

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    port = server.server_port
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    server.shutdown()
    server.server_close()
    thread.join()


def checked(environment: Mapping[str, str], **sections: Any) -> list[str]:
    """Results of the checks of model and data in a process with this environment."""
    job = make_job("hf://me/tiny", **sections).model_dump_json(exclude_unset=True)
    done = subprocess.run(
        [sys.executable, "-c", READ, job],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_model_and_data_of_the_hub_are_read_and_cached(hub: dict[str, str]) -> None:
    data = {"train": {"source": "hf://datasets/me/rows/train"}, "eval": {"source": "hf://me/rows/train"}}
    model, rows = checked(hub, dataset=data)
    assert model.startswith("hf://me/tiny is a t5 model of 0.0 million parameters, tokenized by spiece.model")
    assert rows == (
        "hf://datasets/me/rows/train has 12 samples in 2 shards; hf://me/rows/train has 12 samples in 2 shards"
    )
    pretrained, _ = checked(hub, dataset=data, model={"initialise": "pretrained"})
    assert "has no weights" in pretrained, "those in other folders are not for us"
    model, rows = checked(hub | {"HF_HUB_OFFLINE": "1"}, dataset=data)
    assert model.startswith("JobError: spec.model.source: hf://me/tiny has no tokenizer"), "it was not asked for"
    assert rows.startswith("hf://datasets/me/rows/train has 12 samples")


def test_source_missing_from_the_hub_is_named(hub: dict[str, str]) -> None:
    dataset = {"train": {"source": "hf://me/nothing"}, "eval": None}
    model, rows = checked(hub, dataset=dataset, model={"revision": "v9"})
    assert model.startswith("InfrastructureError: spec.model.source: hf://me/tiny cannot be read from the Hugging Face")
    assert rows.startswith(
        "InfrastructureError: spec.dataset.train.source: hf://me/nothing/index.json cannot be read (404"
    )


# Data


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """An object store on this machine, found by environment variables as in a pod."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {"S3_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment, **keys}.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=environment["S3_ENDPOINT_URL"])
        client.create_bucket(Bucket="bucket")
        yield client
    server.stop()


def data(source: str, directory: Path = Path("/nowhere")) -> str:
    return check_data(make_job("/model", dataset={"train": {"source": source}, "eval": None}), JobDirectory(directory))


def test_shards_in_a_folder_pass_with_their_number(runs: Runs) -> None:
    shards = runs.shards("seq2seq")
    assert data(str(shards)) == f"{shards} has 75 samples in 8 shards"


def test_shards_in_a_bucket_pass_with_their_number(s3: Any, runs: Runs) -> None:
    s3.upload_file(str(runs.shards("seq2seq") / "index.json"), "bucket", "train/index.json")
    assert data("s3://bucket/train/") == "s3://bucket/train/ has 75 samples in 8 shards"


@pytest.mark.usefixtures("s3")
def test_missing_bucket_or_folder_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        InfrastructureError, match=r"s3://bucket/no/index\.json cannot be read \(.*NoSuchKey.*\): check"
    ):
        data("s3://bucket/no")
    with pytest.raises(InfrastructureError, match=r"s3://other/no/index\.json cannot be read \(.*NoSuchBucket"):
        data("s3://other/no")
    with pytest.raises(JobError, match=r"spec\.dataset\.train\.source: .*/no does not exist"):
        data(str(tmp_path / "no"))
    with pytest.raises(JobError, match=r"is not a dataset of MDS shards: it has no index\.json"):
        data(str(tmp_path))


def test_unreachable_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with pytest.raises(InfrastructureError, match=r"Could not connect to the endpoint URL"):
        data("s3://bucket/train")
    monkeypatch.delenv("AZURE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InfrastructureError, match=r"az:// needs the environment variable AZURE_ACCOUNT_NAME"):
        data("az://container/train")


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "is not an index of MDS shards"),
        ('{"shards": 3}', "is not an index"),
        ('{"shards": []}', "has no samples"),
    ],
)
def test_invalid_index_fails(tmp_path: Path, index: str, reason: str) -> None:
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(JobError, match=reason):
        data(str(tmp_path))


def test_index_too_long_to_parse_is_accepted(tmp_path: Path) -> None:
    with (tmp_path / "index.json").open("wb") as stream:
        stream.truncate(16 << 20)
    assert data(str(tmp_path)) == f"{tmp_path} has an index.json of more than 16 MiB"


def prepared(source: str, directory: Path) -> str:
    dataset = {"train": None, "eval": None, "prompt": "{a}", "completion": "{b}", "prepare": {"source": source}}
    return check_data(make_job("/model", dataset=dataset), JobDirectory(directory))


def test_raw_data_in_a_bucket_passes_and_what_is_missing_is_named(s3: Any, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "notes.txt"):
        s3.put_object(Bucket="bucket", Key=f"raw/{name}", Body=b"{}\n" * 250)
    assert prepared("s3://bucket/raw", tmp_path).startswith("s3://bucket/raw has 2 files of raw data (1.5 kB)")
    for source, problem in {
        "s3://bucket/none": "there is no file or folder at s3://bucket/none",
        "s3://bucket/raw/*.txt": r"s3://bucket/raw/notes\.txt has an unknown format",
        "s3://absent/raw": r"s3://absent/raw is missing, or access is denied \(.*NoSuchBucket",
    }.items():
        with pytest.raises(JobError, match=rf"spec\.dataset\.prepare\.source: {problem}"):
            prepared(source, tmp_path)


def test_raw_data_passes_before_it_is_prepared(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"spec\.dataset\.prepare\.source: .*\*\.jsonl does not exist"):
        prepared(f"{tmp_path}/*.jsonl", tmp_path)
    with pytest.raises(JobError, match=r"spec\.dataset\.prepare\.source: the folder .* has no \.jsonl"):
        prepared(str(tmp_path), tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n" * 500)
    assert prepared(f"{tmp_path}/*.jsonl", tmp_path).startswith(f"{tmp_path}/*.jsonl has 1 files of raw data (1.5 kB)")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").symlink_to(runs.shards("seq2seq"))
    assert prepared(f"{tmp_path}/*.jsonl", tmp_path) == f"{tmp_path}/data/train has 75 samples in 8 shards"
