"""Buckets of every kind on this machine: moto, fake-gcs-server, Azurite, and a Hub of our own.

The trainer finds each by environment variables alone, as a user would set them.
"""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import boto3
import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from spotune_trainer.data.stores import find
from tests import emulators

# Azurite's own account.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Bucket:
    """A bucket, container or dataset named "bucket".

    Attributes:
        kind: One of `KINDS`.
        url: Of the bucket.
        put: Writes a file with this key.
        files: Content of all files by key.
    """

    kind: str
    url: str
    put: Callable[[str, bytes], object]
    files: Callable[[], dict[str, bytes]]

    def upload(self, folder: Path, prefix: str) -> str:
        """Write the files of a folder below a prefix, and return its URL."""
        for path in sorted(folder.iterdir()):
            self.put(f"{prefix}/{path.name}", path.read_bytes())
        return f"{self.url}/{prefix}"

    def below(self, prefix: str) -> dict[str, bytes]:
        """Content of the files below a prefix, by their name relative to it."""
        found = self.files().items()
        return {key.removeprefix(f"{prefix}/"): content for key, content in found if key.startswith(f"{prefix}/")}


def _needs(emulator: emulators.Emulator) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not emulator.path.exists(), reason=f"needs {emulator.package}: make emulators")


WRITABLE = [
    pytest.param("s3"),
    pytest.param("gs", marks=_needs(emulators.GOOGLE)),
    pytest.param("gs with keys"),
    pytest.param("az", marks=_needs(emulators.AZURE)),
]
"""Kinds of buckets, for the fixture `bucket`, that files can be written to."""
KINDS = [*WRITABLE, pytest.param("hf")]


@contextmanager
def open_bucket(kind: str) -> Iterator[Bucket]:
    """A new bucket of one of `KINDS`, found by environment variables."""
    opened = {"s3": _s3, "gs": _google, "gs with keys": _google_keys, "az": _azure, "hf": _hub}
    with pytest.MonkeyPatch.context() as patch, opened[kind](patch) as bucket:
        find.open_store.cache_clear()
        yield bucket
    find.open_store.cache_clear()


@contextmanager
def running_emulator(emulator: emulators.Emulator, *options: str, port_option: str) -> Iterator[int]:
    """An emulator on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [str(emulator.path), *options, port_option, str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield port
        finally:
            process.kill()


def _one_at_a_time(put: Callable[[S3Response], Any]) -> Callable[[S3Response], Any]:
    """Makes conditional writes atomic, as those of S3 are: moto looks for the object first, and then writes it."""
    lock = Lock()

    def locked(response: S3Response) -> Any:
        with lock:
            return put(response)

    return locked


@contextmanager
def _moto(patch: pytest.MonkeyPatch, scheme: str) -> Iterator[tuple[str, Bucket]]:
    patch.setattr(S3Response, "put_object", _one_at_a_time(S3Response.put_object))
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("S3_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.delenv(name, raising=False)
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys)
    client.create_bucket(Bucket="bucket")

    def listed() -> list[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket")
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def files() -> dict[str, bytes]:
        return {key: client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in listed()}

    def put(key: str, content: bytes) -> None:
        client.put_object(Bucket="bucket", Key=key, Body=content)

    for key in listed():  # all servers of a process share their buckets
        client.delete_object(Bucket="bucket", Key=key)
    yield f"http://{host}:{port}", Bucket(scheme, f"{scheme}://bucket", put, files)
    server.stop()


@contextmanager
def _s3(patch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with _moto(patch, "s3") as (endpoint, bucket):
        patch.setenv("S3_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        yield bucket


@contextmanager
def _google_keys(patch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with _moto(patch, "gs") as (endpoint, bucket):
        patch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        patch.setenv("GCS_KEY", "test")
        patch.setenv("GCS_SECRET", "test")
        yield bucket


@contextmanager
def _google(patch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    from google.cloud.storage import Client  # type: ignore[import-untyped]

    options = ("-scheme", "http", "-backend", "memory", "-log-level", "error")
    with running_emulator(emulators.GOOGLE, *options, port_option="-port") as port:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        patch.setenv("GOOGLE_CLOUD_PROJECT", "project")
        for name in ("GCS_KEY", "GCS_SECRET"):
            patch.delenv(name, raising=False)
        bucket = Client().create_bucket("bucket")
        yield Bucket(
            "gs",
            "gs://bucket",
            lambda key, content: bucket.blob(key).upload_from_string(content),
            lambda: {blob.name: blob.download_as_bytes() for blob in bucket.list_blobs()},
        )


@contextmanager
def _azure(patch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    from azure.storage.blob import BlobServiceClient

    options = ("--inMemoryPersistence", "--skipApiVersionCheck", "--silent")
    with running_emulator(emulators.AZURE, *options, port_option="--blobPort") as port:
        url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        patch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
        for name, value in {
            "AZURE_STORAGE_ENDPOINT": url,
            "AZURE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_ACCOUNT_ACCESS_KEY": KEY,
        }.items():
            patch.setenv(name, value)
        with BlobServiceClient(url, credential={"account_name": ACCOUNT, "account_key": KEY}) as client:
            container = client.create_container("bucket")
            yield Bucket(
                "az",
                "az://bucket",
                lambda key, content: container.upload_blob(key, content, overwrite=True),
                lambda: {name: container.download_blob(name).readall() for name in container.list_blob_names()},
            )


@contextmanager
def _hub(patch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    from huggingface_hub import constants

    class Handler(_Hub):
        commits: list[dict[str, bytes]] = [{}]  # noqa: RUF012 - one server for each bucket

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    # What HF_ENDPOINT and HF_HUB_OFFLINE set when the client is imported, which an earlier test may have done.
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Bucket(
        "hf",
        "hf://datasets/me/bucket",
        lambda key, content: Handler.commits.append(Handler.commits[-1] | {key: content}),
        lambda: Handler.commits[-1],
    )
    server.shutdown()
    server.server_close()
    thread.join()


class _Hub(BaseHTTPRequestHandler):
    """The part of the Hub's API that its client needs to list and download the files of one dataset.

    Attributes:
        commits: The files of each commit. The hash of a commit is its number.
    """

    protocol_version = "HTTP/1.1"
    commits: list[dict[str, bytes]]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        tree, resolve = "/api/datasets/me/bucket/tree/", "/datasets/me/bucket/resolve/"
        if path == "/api/datasets/me/bucket/revision/main":
            self.send({"id": "me/bucket", "sha": f"{len(self.commits) - 1:040x}"})
        elif path.startswith(tree):
            commit, _, folder = path.removeprefix(tree).partition("/")
            files = self.commits[int(commit, 16)].items()
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": _hash(content)}
                for name, content in files
                if name.startswith(f"{folder}/" if folder else "")
            ]
            self.send(listed, 200 if listed else 404)
        else:
            commit, _, name = path.removeprefix(resolve).partition("/")
            content = self.commits[int(commit, 16)].get(name) if path.startswith(resolve) else None
            self.send(b"" if content is None else content, 404 if content is None else 200, commit)

    do_HEAD = do_GET  # noqa: N815 - the base class's way

    def send(self, content: Any, status: int = 200, commit: str = "") -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Length": str(len(body))}
        headers |= {"X-Error-Code": "EntryNotFound"} if status == 404 else {}
        headers |= {"ETag": f'"{_hash(body)}"', "X-Repo-Commit": commit} if commit else {}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def _hash(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
