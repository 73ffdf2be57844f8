"""Fixtures: buckets of several kinds, each found by environment variables as in a pod."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune_trainer.bucket.client import Bucket, open_bucket
from spotune_trainer.bucket.link import Link, put_link
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support import buckets


@pytest.fixture(scope="session")
def s3_server() -> Iterator[buckets.Bucket]:
    """An S3 server of this process, with a bucket; its endpoint is in the environment."""
    with buckets.open_bucket("s3") as server:
        yield server


@pytest.fixture
def bucket(s3_server: buckets.Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new folder in a bucket on an S3 server."""
    monkeypatch.setattr("spotune_trainer.bucket.client._RETRIES", {"max_retries": 0})
    open_bucket.cache_clear()
    return open_bucket(f"{s3_server.url}/{uuid.uuid4().hex}")


def linked_directory(bucket: Bucket, root: Path) -> JobDirectory:
    """An empty job directory whose storage is the bucket, as another machine has it."""
    directory = JobDirectory(root)
    directory.logs.mkdir(parents=True)
    put_link(directory, Link(bucket.url))
    return directory
