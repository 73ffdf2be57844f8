"""The client against servers of every kind: conditional writes, lists, files of many parts, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.bucket.client import Bucket, BucketError, open_bucket
from spotune_trainer.supervisor.preflight.bucket import check_bucket
from tests.trainer.support import buckets

pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")

# fake-gcs-server lacks the XML API for writes, which the client uses for Google's store.
(AZURE,) = (kind for kind in buckets.WRITABLE if kind.values == ("az",))
KINDS = [pytest.param("s3"), pytest.param(*AZURE.values, marks=[*AZURE.marks, pytest.mark.long])]


@pytest.fixture(params=KINDS)
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A new folder in a bucket of each kind that can be the storage of a job."""
    with buckets.open_bucket(request.param) as server:
        open_bucket.cache_clear()
        yield open_bucket(f"{server.url}/{uuid.uuid4().hex}")
    open_bucket.cache_clear()


def test_an_object_is_created_once_and_a_repeated_request_finds_its_own_content(bucket: Bucket) -> None:
    assert bucket.create("claims/1", b"mine")
    assert not bucket.create("claims/1", b"yours")
    assert bucket.create("claims/1", b"mine"), "the answer to the first request was lost"
    assert bucket.read("claims/1") == b"mine"
    bucket.delete(["claims/1"])
    assert bucket.create("claims/1", b"yours")


def test_objects_are_replaced_listed_by_folder_and_deleted(bucket: Bucket) -> None:
    assert bucket.read("a") is None
    for content in (b"old", b"new and longer"):
        bucket.write("a", content)
        assert bucket.read("a") == content
    for name in ("logs/gen-1/x", "logs/gen-10/x", "logs/gen-2/y"):
        bucket.write(name, b"12345")
    assert bucket.list("logs/gen-1") == {"logs/gen-1/x": 5}
    assert list(bucket.list()) == ["a", "logs/gen-1/x", "logs/gen-10/x", "logs/gen-2/y"]
    assert list(bucket.list("logs", after="logs/gen-1/~")) == ["logs/gen-10/x", "logs/gen-2/y"]
    bucket.delete(["a", "absent", "logs/gen-2/y"])
    assert list(bucket.list()) == ["logs/gen-1/x", "logs/gen-10/x"]


def test_large_files_go_up_in_parts_and_come_back_whole(bucket: Bucket, tmp_path: Path) -> None:
    content = os.urandom((20 << 20) + 12345)
    (tmp_path / "file").write_bytes(content)
    parts: list[int] = []
    bucket.upload("files/large", tmp_path / "file", parts.append)
    assert sum(parts) == len(content)
    assert len(parts) > 2
    bucket.download("files/large", tmp_path / "folder" / "copy")
    assert (tmp_path / "folder" / "copy").read_bytes() == content
    assert bucket.read_start("files/large", 100) == content[:100]
    assert bucket.read_from("files/large", len(content) - 7) == content[-7:]
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        bucket.download("absent", tmp_path / "absent")
    assert not list(tmp_path.glob("*absent*"))


def test_an_upload_that_is_abandoned_leaves_no_object(bucket: Bucket, tmp_path: Path) -> None:
    class AbandonedError(Exception):
        pass

    (tmp_path / "file").write_bytes(os.urandom(20 << 20))

    def abandon(_count: int) -> None:
        raise AbandonedError

    with pytest.raises(AbandonedError):
        bucket.upload("files/large", tmp_path / "file", abandon)
    assert bucket.list("files") == {}


def test_the_check_passes_and_leaves_nothing(bucket: Bucket) -> None:
    check_bucket(bucket)
    assert bucket.list() == {}


def test_a_bucket_that_does_not_exist_is_named_with_what_is_needed(bucket: Bucket) -> None:
    absent = open_bucket(f"{bucket.url.partition(':')[0]}://absent/prefix")
    with pytest.raises(InfrastructureError, match=r"storage\.bucket: .*://absent/prefix.*need to read, write, list"):
        check_bucket(absent)


def test_a_store_that_ignores_conditions_is_refused(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(self: Bucket, name: str, content: bytes) -> bool:
        self.write(name, content)
        return True

    monkeypatch.setattr(Bucket, "create", overwrite)
    with pytest.raises(InfrastructureError, match="ignores the condition of a write"):
        check_bucket(bucket)


CLAIM = """
import sys
from spotune_trainer.bucket.client import Bucket
bucket, name = Bucket(sys.argv[1]), sys.argv[2]
print(*[number for number in range(30) if bucket.create(f"claims/{number}", name.encode())])
"""


def test_of_two_processes_one_gets_each_claim(bucket: Bucket) -> None:
    commands = [[sys.executable, "-c", CLAIM, bucket.url, name] for name in ("a", "b")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    claims = [int(number) for process in processes for number in process.communicate(timeout=120)[0].split()]
    assert sorted(claims) == list(range(30))


def test_a_server_that_does_not_answer_is_a_bucket_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setattr("spotune_trainer.bucket.client._RETRIES", {"max_retries": 0})
    with pytest.raises(BucketError, match=r"s3://bucket/prefix/a cannot be written: .*127\.0\.0\.1:9") as caught:
        Bucket("s3://bucket/prefix").write("a", b"")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://", "http://host/bucket", "bucket", "hf://datasets/me/x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(JobError, match=r"storage\.bucket: .* is not the URL of a bucket; use s3://bucket/prefix"):
        Bucket(url)
