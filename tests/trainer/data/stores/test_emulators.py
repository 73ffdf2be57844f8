"""The stores by their emulators: S3 by moto, Google's by fake-gcs-server, Azure's by Azurite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.data.stores import find
from spotune_trainer.data.stores.azure import azure_client
from spotune_trainer.data.stores.find import find_stored_files, local_copy
from spotune_trainer.data.stores.stored_folder import StoredFolder
from spotune_trainer.supervisor.preflight.object_store import read_object
from tests.trainer.support.buckets import ACCOUNT, KEY, WRITABLE, Bucket

# google-api-core warns of a package for gRPC, which the client of the store does not use.
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")

in_every_kind_of_bucket = pytest.mark.parametrize("bucket", WRITABLE, indirect=True)


@in_every_kind_of_bucket
def test_files_are_listed_read_in_their_version_and_missing_ones_named(bucket: Bucket, tmp_path: Path) -> None:
    root = f"{bucket.url}/rows"
    for key in ("rows/a.jsonl", "rows/b.jsonl", "rows/sub/c.jsonl", "rows-of-others/d.jsonl"):
        bucket.put(key, b"old")
    everything = [f"{root}/a.jsonl", f"{root}/b.jsonl", f"{root}/sub/c.jsonl"]
    assert [file.url for file in find_stored_files(root)] == everything
    assert [file.url for file in find_stored_files(f"{root}/*.jsonl")] == everything[:2]
    (file,) = find_stored_files(f"{root}/a.jsonl")
    with local_copy(file, tmp_path) as path:
        assert path.read_bytes() == b"old"
    bucket.put("rows/a.jsonl", b"new")
    with pytest.raises(InfrastructureError, match="was replaced while"), local_copy(file, tmp_path):
        pass
    scheme = bucket.url.partition(":")[0]
    with pytest.raises(JobError, match=f"no file or folder at {scheme}://bucket/none"):
        find_stored_files(f"{scheme}://bucket/none")
    with pytest.raises(JobError, match=f"{scheme}://absent/rows is missing, or access is denied"):
        find_stored_files(f"{scheme}://absent/rows")


@in_every_kind_of_bucket
def test_files_are_written_replaced_and_deleted(bucket: Bucket) -> None:
    bucket.put("shards-of-others/a", b"other")
    folder = StoredFolder(f"{bucket.url}/shards/")
    assert folder.read("a") is None
    for content in (b"old", b"", bytes(range(256)) * 4096):
        folder.write("a", content)
        assert folder.read("a") == content
    folder.write("sub/a.json", b"{}")
    assert {name: file.size for name, file in folder.list_files().items()} == {"a": 1 << 20, "sub/a.json": 2}
    assert list(folder.list_files("sub/")) == ["sub/a.json"]
    folder.delete("a")
    folder.delete("a")
    assert bucket.below("shards") == {"sub/a.json": b"{}"}
    assert bucket.below("shards-of-others") == {"a": b"other"}
    scheme = bucket.url.partition(":")[0]
    with pytest.raises(JobError, match=f"{scheme}://absent/a is missing, or access is denied"):
        StoredFolder(f"{scheme}://absent").write("a", b"")


@in_every_kind_of_bucket
def test_the_check_before_a_run_reads_the_first_bytes(bucket: Bucket) -> None:
    bucket.put("train/index.json", b"0123456789")
    assert read_object(f"{bucket.url}/train/index.json", 4, "spec.dataset.train.source") == b"0123"
    with pytest.raises(InfrastructureError, match=r"spec\.dataset\.train\.source: .*/none cannot be read"):
        read_object(f"{bucket.url}/train/none", 4, "spec.dataset.train.source")


@pytest.mark.parametrize("bucket", [kind for kind in WRITABLE if kind.values == ("az",)], indirect=True)
def test_a_connection_string_of_azure_is_enough(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("connected/a.jsonl", b"{}\n")
    endpoint = os.environ["AZURE_STORAGE_ENDPOINT"]
    for name in ("AZURE_STORAGE_ENDPOINT", "AZURE_ACCOUNT_NAME", "AZURE_ACCOUNT_ACCESS_KEY"):
        monkeypatch.delenv(name)
    connection = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    find.open_store.cache_clear()
    assert [file.url for file in find_stored_files("az://bucket/connected")] == ["az://bucket/connected/a.jsonl"]
    find.open_store.cache_clear()


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "https://me.blob.core.windows.net/"),
        ({"AZURE_STORAGE_ENDPOINT": "https://me.blob.core.example.cn"}, "https://me.blob.core.example.cn/"),
        ({"AZURE_STORAGE_ENDPOINT": "https://store.example.com/me"}, "https://store.example.com/me/"),
    ],
)
def test_the_endpoint_of_azure_is_that_of_the_account_unless_another_is_set(
    variables: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_ACCOUNT_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for key in ("", KEY):  # with a login, and with a key
        monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", key)
        with azure_client() as client:
            assert client.url == url


def test_a_malformed_connection_string_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName")
    with pytest.raises(JobError, match="AZURE_STORAGE_CONNECTION_STRING is malformed: "):
        azure_client()
