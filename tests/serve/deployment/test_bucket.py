"""Models in buckets: what is downloaded from a real server, where to, and the errors."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from moto.server import ThreadedMotoServer

from spotune.errors import InfrastructureError, JobError
from spotune_serve.deployment import bucket as bucket_module
from spotune_serve.deployment.bucket import BucketModel
from spotune_serve.deployment.exports import load_version
from spotune_serve.deployment.hub import model_folder
from spotune_serve.engine.weights.load import load_model
from spotune_serve.gateway.served_model import ServedModel
from tests.serve.support.exported import export_tiny_model

FILES = {
    "config.json": b"{}", "tokenizer.json": b"{}", "spotune.json": b"{}", "model-1.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"x", "modeling_custom.py": b"x", "README.md": b"x", "consolidated.safetensors": b"x",
    "checkpoint-5/config.json": b"old", "empty.txt": b"",
}  # fmt: skip
WITHOUT_WEIGHTS = {"config.json", "tokenizer.json", "spotune.json", "empty.txt"}


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of an object store on this machine with the bucket "models", found by boto3's environment variables."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("S3_ENDPOINT_URL", raising=False)
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        yield client
    server.stop()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the downloads. No pause before another attempt."""
    monkeypatch.setenv("SPOTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(bucket_module, "_PAUSES_SECONDS", (0.0, 0.0, 0.0))
    return tmp_path / "buckets"


def put(s3: Any, prefix: str, files: dict[str, bytes]) -> BucketModel:
    for name, content in files.items():
        s3.put_object(Bucket="models", Key=f"{prefix}/{name}", Body=content)
    return BucketModel("models", prefix)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_replica_downloads_weights_and_no_code(s3: Any, cache: Path) -> None:
    folder = model_folder(put(s3, "team/llama", FILES))
    assert contents(folder) == {name: FILES[name] for name in WITHOUT_WEIGHTS | {"model-1.safetensors"}}
    assert folder.parent == cache
    assert folder.name.startswith("llama-")


def test_a_gateway_downloads_no_weights(s3: Any) -> None:
    assert set(contents(model_folder(put(s3, "gateway", FILES), weights=False))) == WITHOUT_WEIGHTS


def test_a_prefix_does_not_match_longer_names(s3: Any) -> None:
    put(s3, "names/a-b", FILES)
    with pytest.raises(JobError, match=r"there is no file at s3://models/names/a/\. Check .* spec\.model\.source"):
        model_folder(BucketModel("models", "names/a"))


def test_a_changed_model_is_another_folder_and_an_unchanged_one_is_not_downloaded_again(s3: Any) -> None:
    model = put(s3, "changed", FILES)
    first = model_folder(model)
    (first / "config.json").write_text("kept")
    assert model_folder(model) == first
    assert (first / "config.json").read_text() == "kept"
    put(s3, "changed", {"model-1.safetensors": b"others!" * 1000})
    second = model_folder(model)
    assert second != first
    assert (second / "model-1.safetensors").read_bytes() == b"others!" * 1000


def test_parts_of_an_upload_have_no_md5_of_the_file(s3: Any) -> None:
    model = put(s3, "parts", {"config.json": b"{}"})
    named = {"Bucket": "models", "Key": "parts/model.safetensors"}
    upload = named | {"UploadId": s3.create_multipart_upload(**named)["UploadId"]}
    part = s3.upload_part(**upload, PartNumber=1, Body=b"weights")
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]})
    assert (model_folder(model) / "model.safetensors").read_bytes() == b"weights"


def test_processes_of_a_node_that_start_together_share_one_folder(s3: Any, cache: Path) -> None:
    model = put(s3, "together", FILES)
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: model_folder(model), range(4)))
    assert len(folders) == 1
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [folders.pop().name]


def test_a_folder_without_a_model_is_refused(s3: Any) -> None:
    with pytest.raises(JobError, match=r"s3://models/job/ has no config\.json.*spec\.model\.source.*ends with export"):
        model_folder(put(s3, "job", {"result.json": b"{}", "export/config.json": b"{}"}))


def test_a_missing_bucket_is_refused(s3: Any) -> None:
    with pytest.raises(JobError, match=r"s3://missing/a cannot be downloaded: .*NoSuchBucket.*spec\.model\.source"):
        model_folder(BucketModel("missing", "a"))


def test_gateway_and_engine_load_an_exported_model(s3: Any, tmp_path: Path) -> None:
    export = export_tiny_model(tmp_path / "export", "causal")
    model = put(s3, "team/tiny/export", contents(export))
    served = load_version(model, None, ServedModel.load, weights=False)
    assert served.name == ServedModel.load(export).name
    loaded = load_version(model, None, load_model).state_dict()
    expected = load_model(export).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@dataclass
class FaultyStore:
    """A server with the S3 protocol and one model, whose answers a test spoils.

    Attributes:
        status: HTTP status of each answer; 200: none is spoiled.
        cut: names of files whose next answer ends early.
        altered: names of files whose answers all have another first byte.
        replaced: whether the files have other ETags than those listed.
        requested: names of the files that were asked for.
        signed: whether a request was signed.
    """

    status: int = 200
    code: str = "AccessDenied"
    cut: set[str] = field(default_factory=set)
    altered: set[str] = field(default_factory=set)
    replaced: bool = False
    requested: list[str] = field(default_factory=list)
    signed: bool = False

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.signed |= "Authorization" in request.headers
        if self.status != 200:
            self._send(request, self.status, f"<Error><Code>{self.code}</Code></Error>".encode())
        elif "list-type" in request.path:
            listed = "".join(
                f"<Contents><Key>m/{name}</Key><Size>{len(body)}</Size><ETag>{md5(body)}</ETag></Contents>"
                for name, body in MODEL.items()
            )
            self._send(request, 200, f"<ListBucketResult>{listed}</ListBucketResult>".encode())
        else:
            name = request.path.partition("?")[0].rpartition("/")[2]
            self.requested.append(name)
            body = MODEL[name]
            etag = md5(b"new" if self.replaced else body)
            length = len(body)
            if name in self.altered:
                body = b"!" + body[1:]
            if name in self.cut:
                self.cut.remove(name)
                body = body[:1]
            self._send(request, 200, body, etag, length)

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, etag: str = "", length: int = -1
    ) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(body) if length < 0 else length))
        if etag:
            request.send_header("ETag", f'"{etag}"')
        request.end_headers()
        request.wfile.write(body)
        request.close_connection = True


MODEL = {"config.json": b"{}", "model.safetensors": b"weights"}


def md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


@contextmanager
def serving(store: FaultyStore) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            store.answer(self)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """The store that boto3 finds. One attempt of boto3 for each of ours."""
    store = FaultyStore()
    with serving(store) as url:
        monkeypatch.delenv("S3_ENDPOINT_URL", raising=False)
        variables = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        for name, value in (variables | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}).items():
            monkeypatch.setenv(name, value)
        yield store


def test_a_file_that_was_cut_is_downloaded_again(faulty: FaultyStore) -> None:
    faulty.cut = {"model.safetensors"}
    assert contents(model_folder(BucketModel("models", "m"))) == MODEL
    assert sorted(faulty.requested) == ["config.json", "model.safetensors", "model.safetensors"]


def test_complete_files_are_kept_for_the_next_attempt(faulty: FaultyStore, cache: Path) -> None:
    faulty.altered = {"model.safetensors"}
    with pytest.raises(InfrastructureError, match=r"model\.safetensors: the bytes have the MD5 .*can be reached"):
        model_folder(BucketModel("models", "m"))
    assert [path for path in cache.iterdir() if path.is_dir() and not path.name.startswith(".")] == []
    faulty.altered, faulty.requested = set(), []
    assert contents(model_folder(BucketModel("models", "m"))) == MODEL
    assert faulty.requested == ["model.safetensors"]


def test_files_that_are_replaced_meanwhile_are_not_mixed(faulty: FaultyStore) -> None:
    faulty.replaced = True
    with pytest.raises(InfrastructureError, match="s3://models/m was replaced while it was downloaded"):
        model_folder(BucketModel("models", "m"))


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (403, "SignatureDoesNotMatch"), (404, "NoSuchKey")]
)
def test_denied_access_names_field_and_remedy(status: int, code: str, faulty: FaultyStore) -> None:
    faulty.status, faulty.code = status, code
    message = rf"s3://models/m cannot be downloaded: .*{code}.*spec\.model\.source.*serviceAccountName.*podTemplate"
    with pytest.raises(JobError, match=message):
        model_folder(BucketModel("models", "m"))


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (400, "ExpiredToken")])
def test_an_outage_is_no_fault_of_the_model(status: int, code: str, faulty: FaultyStore) -> None:
    faulty.status, faulty.code = status, code
    with pytest.raises(InfrastructureError, match=rf"{code}.*can be reached from here.*AWS_ENDPOINT_URL"):
        model_folder(BucketModel("models", "m"))


def test_a_store_that_does_not_listen_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FaultyStore()) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.delenv("S3_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(InfrastructureError, match="s3://models/m cannot be downloaded: Could not connect"):
        model_folder(BucketModel("models", "m"))


def test_without_credentials_a_public_bucket_is_read_unsigned(
    faulty: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    assert contents(model_folder(BucketModel("models", "m"))) == MODEL
    assert not faulty.signed


def test_a_cache_that_cannot_be_written_is_named(
    faulty: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPOTUNE_CACHE", str(tmp_path / "file"))
    with pytest.raises(InfrastructureError, match="Set SPOTUNE_CACHE to a folder with more room"):
        model_folder(BucketModel("models", "m"))
