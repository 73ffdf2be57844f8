"""Which directory may be the copy of which bucket, and what commands do with checkpoints that only the bucket has."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune.errors import InfrastructureError, JobError, UsageError
from spotune_trainer import files
from spotune_trainer.bucket.checkpoints import refresh
from spotune_trainer.bucket.client import Bucket, open_bucket
from spotune_trainer.bucket.link import link_of
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.cli.checkpoint import verify_command
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.bucket import open_storage
from tests.trainer.bucket.conftest import linked_directory
from tests.trainer.bucket.test_checkpoints import checkpointers, commit
from tests.trainer.support.tiny import make_job


def test_a_new_directory_becomes_a_copy_of_the_bucket(bucket: Bucket, directory: JobDirectory) -> None:
    opened = open_storage(f"{bucket.url}/", directory)
    assert opened is not None
    link = link_of(directory)
    assert link is not None
    assert opened.url == link.url == bucket.url
    assert open_storage(bucket.url, directory) is not None


def test_a_directory_without_a_bucket_is_the_storage(directory: JobDirectory) -> None:
    assert open_storage(None, directory) is None


def test_a_run_and_its_bucket_belong_together(bucket: Bucket, directory: JobDirectory, tmp_path: Path) -> None:
    open_storage(bucket.url, directory)
    with pytest.raises(UsageError, match=rf"is a copy of a run in {bucket.url}: give --bucket {bucket.url}"):
        open_storage(None, directory)
    with pytest.raises(UsageError, match=rf"is a copy of a run in {bucket.url}: give a new --directory"):
        open_storage(f"{bucket.url}-2", directory)
    other = JobDirectory(tmp_path / "other")
    other.root.mkdir()
    other.job.write_text("{}")
    with pytest.raises(UsageError, match=rf"holds a run that is not in {bucket.url}: give a new --directory"):
        open_storage(bucket.url, other)


def test_a_bucket_that_cannot_be_reached_is_named_before_anything_is_written(
    directory: JobDirectory, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    open_bucket.cache_clear()
    with pytest.raises(InfrastructureError, match=r"storage\.bucket: s3://.*127\.0\.0\.1:9.*need to read, write, list"):
        open_storage(bucket.url, directory)
    assert link_of(directory) is None


def test_checkpoints_are_verified_in_the_bucket(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, other = (linked_directory(bucket, tmp_path / name) for name in ("home", "other"))
    claim(home, None)
    ranks = checkpointers([home])
    for step in (5, 10):
        commit(ranks, step)
    refresh(bucket, other)
    files.write_json(other.job, make_job("/model").model_dump(mode="json"))
    assert not list(other.checkpoints.glob("*/*.safetensors"))
    verify_command(other.root)
    assert capsys.readouterr().out.count("whole") == 2
    bucket.write("checkpoints/step-00000010.gen-1/rank-00000.safetensors", b"torn")
    refresh(bucket, other)
    with pytest.raises(JobError, match=r"1 of 2 checkpoints are damaged: step-00000010\.gen-1"):
        verify_command(other.root)
