"""Checks a bucket before it becomes the storage of a job: that it can be written to, and that its conditions hold."""

from __future__ import annotations

import uuid

from spotune.errors import InfrastructureError, UsageError
from spotune_trainer.bucket.client import Bucket, BucketError, open_bucket
from spotune_trainer.bucket.link import link_of
from spotune_trainer.bucket.state_mirror import pull_job
from spotune_trainer.job_directory.layout import JobDirectory

_PROBE = ".spotune-probe"


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


def check_bucket(bucket: Bucket) -> None:
    """Write a small object, try to create it again, read it, list it and delete it.

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
