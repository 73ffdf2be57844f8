"""Prepared data on its way from the head through the bucket to the workers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from spotune_trainer import files
from spotune_trainer.bucket.client import Bucket, BucketError
from spotune_trainer.bucket.folders import pull_for_ranks
from spotune_trainer.bucket.generation_logs import GenerationLogUpload
from spotune_trainer.checkpoint.generations import claim, last_logged_step
from spotune_trainer.driver.bucket import DriverBucket
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.bucket.conftest import linked_directory


def prepare(directory: JobDirectory, text: str) -> None:
    """Make shards whose sizes do not depend on the data."""
    directory.prepared().mkdir(parents=True, exist_ok=True)
    (directory.prepared() / "shard.00000.mds").write_text(text * 1000)
    files.write_json(directory.data_manifest, {"source": text})


def upload(directory: JobDirectory) -> None:
    DriverBucket(directory, lambda _message: None, lambda _seconds: None).upload_data()


def shard(directory: JobDirectory) -> str:
    return (directory.prepared() / "shard.00000.mds").read_text()


def test_workers_get_the_shards_that_the_head_has_made(bucket: Bucket, tmp_path: Path) -> None:
    head, worker = linked_directory(bucket, tmp_path / "head"), linked_directory(bucket, tmp_path / "worker")
    prepare(head, "a")
    upload(head)
    beats: list[None] = []
    pull_for_ranks(bucket, worker, lambda: beats.append(None))
    assert shard(worker) == shard(head)
    assert len(beats) >= 2


def test_shards_of_other_data_replace_those_of_the_same_size(bucket: Bucket, tmp_path: Path) -> None:
    head = linked_directory(bucket, tmp_path / "head")
    prepare(head, "a")
    upload(head)
    prepare(head, "b")
    upload(head)
    worker = linked_directory(bucket, tmp_path / "worker")
    pull_for_ranks(bucket, worker, lambda: None)
    assert shard(worker) == "b" * 1000


def test_manifest_is_uploaded_when_all_shards_are_there(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is lost meanwhile leaves no data that looks complete."""
    head = linked_directory(bucket, tmp_path / "head")
    prepare(head, "a")

    def refuse(_self: Bucket, name: str, *_: object) -> None:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr(Bucket, "upload", refuse)
    with pytest.raises(KeyboardInterrupt, match=r"shard\.00000\.mds"):
        upload(head)
    assert bucket.list("data") == {}


def test_of_the_ranks_of_a_node_one_downloads(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, worker = linked_directory(bucket, tmp_path / "head"), linked_directory(bucket, tmp_path / "worker")
    prepare(head, "a")
    upload(head)
    downloaded: list[str] = []
    download = Bucket.download

    def counted(self: Bucket, name: str, path: Path) -> None:
        downloaded.append(name)
        download(self, name, path)

    monkeypatch.setattr(Bucket, "download", counted)
    ranks = [threading.Thread(target=pull_for_ranks, args=(bucket, worker, lambda: None)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert sorted(downloaded) == ["data/train/manifest.json", "data/train/shard.00000.mds"]


def test_driver_learns_what_ranks_have_logged_and_committed_since_its_start(bucket: Bucket, tmp_path: Path) -> None:
    head, rank = linked_directory(bucket, tmp_path / "head"), linked_directory(bucket, tmp_path / "rank")
    generation = claim(rank, None).number
    logs = rank.generation_logs(generation)
    logs.root.mkdir(parents=True)
    files.append_json(logs.steps, {"step": 1})
    with GenerationLogUpload.of_rank(bucket, rank, logs, 0):
        pass
    DriverBucket(head, lambda _message: None, lambda _seconds: None).refresh()
    assert last_logged_step(head, generation, 0) == 1


def test_driver_waits_for_a_bucket_that_cannot_be_reached(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = linked_directory(bucket, tmp_path / "head")
    prepare(head, "a")
    said: list[str] = []

    def refuse(*_: object) -> None:
        raise BucketError("s3 is away")

    monkeypatch.setattr(Bucket, "upload", refuse)
    DriverBucket(head, said.append, lambda _seconds: monkeypatch.undo()).upload_data()
    assert said == ["s3 is away; trying again"]
    assert len(bucket.list("data")) == 2
