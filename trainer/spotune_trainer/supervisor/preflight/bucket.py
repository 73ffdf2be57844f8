"""The bucket of a job when its supervisor starts: whether it can be the storage, and what earlier runs left in it."""

from __future__ import annotations

import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from spotune.errors import InfrastructureError, JobError, UsageError
from spotune.job import FinetuneJob
from spotune_trainer.bucket.client import Bucket, BucketError, open_bucket
from spotune_trainer.bucket.link import link_of
from spotune_trainer.bucket.state_mirror import DATA, pull_job
from spotune_trainer.bucket.writer import newest_status
from spotune_trainer.job_directory.layout import JobDirectory

_PROBE = ".spotune-probe"
_BLOCK_BYTES = 8 << 20
_HEARTBEAT_SECONDS = 5.0


def open_storage(url: str | None, directory: JobDirectory) -> Bucket | None:
    """The bucket of a run on this machine, after its state was downloaded to the directory; None without a URL.

    Raises:
        UsageError: the directory belongs to another bucket, or to none.
        InfrastructureError: the bucket cannot be used.
    """
    link = link_of(directory)
    if url is None:
        if link is not None:
            raise UsageError(f"{directory.root} is a copy of a run in {link.url}: give --bucket {link.url}")
        return None
    bucket = open_bucket(url.rstrip("/"))
    if link is None and directory.job.exists():
        raise UsageError(f"{directory.root} holds a run that is not in {bucket.url}: give a new --directory")
    if link is not None and link.url != bucket.url:
        raise UsageError(f"{directory.root} is a copy of a run in {link.url}: give a new --directory for {bucket.url}")
    check_bucket(bucket)
    try:
        pull_job(bucket, directory)
    except BucketError as error:
        raise InfrastructureError(f"storage.bucket: {error}") from error
    return bucket


def storage_url(job: FinetuneJob, option: str | None) -> str | None:
    """The bucket of a run on this machine: that of the option, or else that of the job; None without any."""
    return option or job.spec.storage.bucket or None


def pull_to_pod(url: str, directory: JobDirectory) -> Bucket:
    """The bucket of a pod's job, after its state was downloaded. Writes nothing to it.

    Raises:
        InfrastructureError: it cannot be read, or there are no credentials.
    """
    try:
        bucket = open_bucket(url)
        pull_job(bucket, directory, DATA)
    except (BucketError, JobError) as error:
        raise InfrastructureError(str(error) if isinstance(error, JobError) else f"storage.bucket: {error}") from error
    return bucket


def other_heartbeat(url: str, clock: Callable[[], float] = time.monotonic) -> Callable[[], object]:
    """A function that returns what changes while the newest run of the bucket's job makes progress: its heartbeat.

    A bucket that cannot be reached counts as a change: nobody knows.
    """
    last: tuple[float, object] = (float("-inf"), None)

    def read() -> object:
        nonlocal last
        if clock() - last[0] >= _HEARTBEAT_SECONDS:
            try:
                last = clock(), json.loads(newest_status(open_bucket(url)) or "{}").get("heartbeat")
            except BucketError:
                last = clock(), object()
        return last[1]

    return read


def measure_upload(bucket: Bucket, num_bytes: int, clock: Callable[[], float] = time.monotonic) -> float:
    """Bytes a second of one writer.

    Raises:
        BucketError: the bucket does not accept them.
    """
    name = f"{_PROBE}/{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with path.open("wb") as stream:
            for start in range(0, num_bytes, _BLOCK_BYTES):
                stream.write(os.urandom(min(_BLOCK_BYTES, num_bytes - start)))
        started = clock()
        bucket.upload(name, path)
        seconds = clock() - started
    bucket.delete([name])
    return num_bytes / max(seconds, 1e-6)


def check_bucket(bucket: Bucket) -> str:
    """Write a small object, try to create it again, read it, list it and delete it.

    Returns:
        One sentence.

    Raises:
        InfrastructureError: one of these failed; the message says what is needed.
    """
    folder = f"{_PROBE}/{uuid.uuid4().hex}"
    name = f"{folder}/object"
    try:
        created, again = bucket.create(name, b"first"), bucket.create(name, b"second")
        found, listed = bucket.read(name), bucket.list(folder)
        bucket.delete([name])
        gone = bucket.read(name)
    except (BucketError, FileNotFoundError) as error:
        raise InfrastructureError(
            f"storage.bucket: {error}. The credentials need to read, write, list and delete below {bucket.url}"
        ) from error
    if not created or again or found != b"first":
        raise InfrastructureError(
            f"storage.bucket: the store of {bucket.url} ignores the condition of a write (If-None-Match: *), so it "
            "cannot fence off an older run: use a store that supports conditional writes"
        )
    if listed != {name: len(b"first")} or gone is not None:
        raise InfrastructureError(
            f"storage.bucket: {bucket.url} does not list or delete an object right after it was written: use a store "
            "that is strongly consistent"
        )
    return f"{bucket.url} can be written, read, listed and deleted, and keeps the condition of a write"
