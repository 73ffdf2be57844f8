"""Reading samples by id: in place and from S3, with killed processes and damaged files."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.data import cache
from spotune_trainer.data.shards import ShardedDataset
from tests.trainer.data.conftest import WriteShards

Rows = list[dict[str, Any]]


@pytest.fixture
def uploaded(s3: Any, write_shards: WriteShards, rows: Rows, request: pytest.FixtureRequest) -> str:
    folder = write_shards(rows)
    prefix = request.node.name
    for path in folder.iterdir():
        s3.upload_file(str(path), "bucket", f"{prefix}/{path.name}")
    return f"s3://bucket/{prefix}"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FIRST_RETRY_DELAY_SECONDS", 0.01)


def same(dataset: ShardedDataset, rows: Rows) -> bool:
    return dataset.num_samples == len(rows) and all(
        np.array_equal(dataset[i][column], row[column]) for i, row in enumerate(rows) for column in row
    )


def shard_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*/*.mds") if path.is_file())


def test_a_folder_is_read_in_place(write_shards: WriteShards, rows: Rows, tmp_path: Path) -> None:
    dataset = ShardedDataset(str(write_shards(rows, per_shard=7)), tmp_path / "cache")
    assert same(dataset, rows)
    assert dataset.shard_sizes == [7] * 14 + [2]
    assert dataset.columns == {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    assert not (tmp_path / "cache").exists()
    for outside in (-1, 100):
        with pytest.raises(IndexError, match="of 100"):
            dataset[outside]


def test_compressed_shards_are_unpacked_into_the_cache(write_shards: WriteShards, rows: Rows, tmp_path: Path) -> None:
    folder = write_shards(rows, compression="zstd")
    before = sorted(folder.iterdir())
    assert same(ShardedDataset(str(folder), tmp_path / "cache"), rows)
    assert sorted(folder.iterdir()) == before
    assert len(shard_files(tmp_path / "cache")) == 10


def test_the_number_of_open_shards_is_limited(write_shards: WriteShards, rows: Rows, tmp_path: Path) -> None:
    dataset = ShardedDataset(str(write_shards(rows)), tmp_path, max_open_shards=2)
    assert same(dataset, rows)
    assert same(dataset, rows)
    assert len(dataset._open_shards) == 2


def test_index_hash_identifies_the_content(write_shards: WriteShards, rows: Rows, tmp_path: Path) -> None:
    hashes = [
        ShardedDataset(str(write_shards(content, name)), tmp_path).index_hash
        for name, content in {"one": rows, "copy": rows, "other": rows[::-1]}.items()
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_shards_are_downloaded_from_s3_once_and_survive_a_restart(
    s3: Any, uploaded: str, rows: Rows, tmp_path: Path
) -> None:
    assert same(ShardedDataset(uploaded, tmp_path), rows)
    s3.delete_object(Bucket="bucket", Key=f"{uploaded.removeprefix('s3://bucket/')}/shard.00003.mds")
    assert same(ShardedDataset(uploaded, tmp_path), rows)  # as a new process would


def test_a_rewritten_dataset_is_not_mixed_with_cached_shards(
    s3: Any, uploaded: str, rows: Rows, write_shards: WriteShards, tmp_path: Path
) -> None:
    assert same(ShardedDataset(uploaded, tmp_path), rows)
    for path in write_shards(rows[::-1], "again").iterdir():
        s3.upload_file(str(path), "bucket", f"{uploaded.removeprefix('s3://bucket/')}/{path.name}")
    assert same(ShardedDataset(uploaded, tmp_path), rows[::-1])


def test_error_names_a_missing_shard(s3: Any, uploaded: str, tmp_path: Path) -> None:
    s3.delete_object(Bucket="bucket", Key=f"{uploaded.removeprefix('s3://bucket/')}/shard.00003.mds")
    dataset = ShardedDataset(uploaded, tmp_path)
    with pytest.raises(JobError, match=r"shard\.00003\.mds of s3://bucket/.* missing"):
        dataset[35]
    assert dataset[5]["input_ids"][0] == 5


@pytest.mark.parametrize("damage", ["short", "flipped"])
def test_a_damaged_upload_is_rejected_until_it_is_uploaded_again(
    s3: Any, uploaded: str, rows: Rows, tmp_path: Path, damage: str
) -> None:
    key = f"{uploaded.removeprefix('s3://bucket/')}/shard.00003.mds"
    whole: bytes = s3.get_object(Bucket="bucket", Key=key)["Body"].read()
    broken = whole[:-1] if damage == "short" else whole[:-1] + bytes([whole[-1] ^ 1])
    s3.put_object(Bucket="bucket", Key=key, Body=broken)
    dataset = ShardedDataset(uploaded, tmp_path)
    with pytest.raises(JobError, match=r"shard\.00003\.mds.*spotune shard"):
        dataset[35]
    s3.put_object(Bucket="bucket", Key=key, Body=whole)
    assert same(dataset, rows)


def test_a_damaged_file_in_the_cache_is_downloaded_again(s3: Any, uploaded: str, rows: Rows, tmp_path: Path) -> None:
    assert same(ShardedDataset(uploaded, tmp_path / "cache"), rows)
    short, flipped = shard_files(tmp_path / "cache")[:2]
    short.write_bytes(short.read_bytes()[:50])
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    assert same(ShardedDataset(uploaded, tmp_path / "cache"), rows)


def test_error_names_a_damaged_shard_that_is_read_in_place(
    write_shards: WriteShards, rows: Rows, tmp_path: Path
) -> None:
    folder = write_shards(rows)
    path = folder / "shard.00002.mds"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(JobError, match=r"shard\.00002\.mds is damaged"):
        ShardedDataset(str(folder), tmp_path)[25]
    path.unlink()
    with pytest.raises(JobError, match=r"shard\.00002\.mds of .* missing"):
        ShardedDataset(str(folder), tmp_path)[25]


def test_an_unreachable_store_is_an_infrastructure_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with pytest.raises(InfrastructureError, match=r"index\.json of s3://bucket/x could not be read in 4 attempts"):
        ShardedDataset("s3://bucket/x", tmp_path)


def test_a_transient_download_failure_is_retried(
    s3: Any, uploaded: str, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = cache.FileSource.download, []

    def flaky(self: cache.FileSource, basename: str, target: Path) -> None:
        calls.append(basename)
        if calls.count(basename) < 3:
            target.write_bytes(b"half of a")
            raise ConnectionResetError("connection reset by peer")
        real(self, basename, target)

    monkeypatch.setattr(cache.FileSource, "download", flaky)
    assert same(ShardedDataset(uploaded, tmp_path), rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"version": 1, "shards": []}', "not in MDS version 2"),
        ('{"version": 2, "shards": []}', "has no samples"),
        ('{"version": 2, "shards": [{"format": "csv", "samples": 3}]}', r"not in MDS version 2 \(found csv\)"),
        (None, "no index.json; write it with"),
    ],
)
def test_a_folder_that_is_not_a_dataset_is_rejected(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(JobError, match=message):
        ShardedDataset(str(tmp_path), tmp_path / "cache")


def test_error_names_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"absent is not a dataset.*no such folder"):
        ShardedDataset(str(tmp_path / "absent"), tmp_path)


def test_pickled_columns_are_rejected(write_shards: WriteShards, tmp_path: Path) -> None:
    folder = write_shards([{"input_ids": [1]}], columns={"input_ids": "pkl"})
    with pytest.raises(JobError, match="unsafe type"):
        ShardedDataset(str(folder), tmp_path)


def test_shards_with_different_columns_are_rejected(write_shards: WriteShards, rows: Rows, tmp_path: Path) -> None:
    folder = write_shards(rows)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][4]["column_names"] = ["input_ids", "targets"]
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(JobError, match=r"shard\.00000\.mds has input_ids, labels; shard\.00004\.mds has input_ids, ta"):
        ShardedDataset(str(folder), tmp_path)


def test_sources_are_translated_to_streaming_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache._streaming_url("hf://org/name/x") == "hf://datasets/org/name/x"
    assert cache._streaming_url("hf://datasets/org/name") == "hf://datasets/org/name"
    for name in ("AZURE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JobError, match="AZURE_ACCOUNT_NAME"):
        cache.FileSource("az://box/x")
    with pytest.raises(JobError, match="an unknown scheme"):
        cache._streaming_url("ftp://box/x")


def test_the_number_of_prefetched_shards_is_limited(s3: Any, uploaded: str, rows: Rows, tmp_path: Path) -> None:
    with ShardedDataset(uploaded, tmp_path / "cache", max_prefetched_shards=3) as dataset:
        assert dataset.prefetch([55, 56, 12])
        assert not dataset.prefetch([99, 1])
        deadline = time.monotonic() + 60
        while len(shard_files(tmp_path / "cache")) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [path.name for path in shard_files(tmp_path / "cache")] == [f"shard.0000{n}.mds" for n in (1, 5, 9)]
        assert dataset[12]["input_ids"][0] == 12
        assert dataset.prefetch([1])
        assert same(dataset, rows)


def test_a_failed_prefetch_is_raised_when_its_shard_is_read(s3: Any, uploaded: str, tmp_path: Path) -> None:
    s3.delete_object(Bucket="bucket", Key=f"{uploaded.removeprefix('s3://bucket/')}/shard.00001.mds")
    with ShardedDataset(uploaded, tmp_path) as dataset:
        dataset.prefetch([15, 25])
        assert dataset[25]["input_ids"][0] == 25
        with pytest.raises(JobError, match=r"shard\.00001\.mds"):
            dataset[15]


def read_all(source: str, directory: Path, log: Path, result: Path, environment: dict[str, str], *, hang: bool) -> None:
    """The body of a reader process: log its downloads, read all samples, and write the sum of their first tokens."""
    os.environ.update(environment)
    real = cache.FileSource.download

    def download(self: cache.FileSource, basename: str, target: Path) -> None:
        real(self, basename, target)
        with log.open("a") as stream:
            stream.write(basename + "\n")
        if hang and basename == "shard.00002.mds":
            target.write_bytes(target.read_bytes()[:20])
            time.sleep(600)

    cache.FileSource.download = download  # type: ignore[method-assign]
    dataset = ShardedDataset(source, directory)
    result.write_text(str(sum(int(dataset[number]["input_ids"][0]) for number in range(len(dataset)))))


def test_processes_share_a_cold_cache_and_a_kill_during_a_download_blocks_no_other(
    s3: Any, uploaded: str, rows: Rows, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spotune_trainer.data.preparation.prepare"])
    log, directory = tmp_path / "log", tmp_path / "cache"
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "S3_"))}

    def start(name: str, *, hang: bool = False) -> Any:
        arguments = (uploaded, directory, log, tmp_path / name, environment)
        process = context.Process(target=read_all, args=arguments, kwargs={"hang": hang})
        process.start()
        return process

    victim = start("victim", hang=True)
    deadline = time.monotonic() + 120
    while not log.exists() or "shard.00002.mds" not in log.read_text():
        assert time.monotonic() < deadline
        assert victim.is_alive()
        time.sleep(0.02)
    readers = [start(f"reader-{number}") for number in range(2)]
    time.sleep(1)
    victim.kill()
    for reader in readers:
        reader.join(120)
    assert [(tmp_path / f"reader-{number}").read_text() for number in range(2)] == [str(sum(range(100)))] * 2
    downloads = [line for line in log.read_text().split() if line != "index.json"]
    assert sorted(downloads) == sorted([f"shard.0000{n}.mds" for n in range(10)] + ["shard.00002.mds"])
    assert same(ShardedDataset(uploaded, directory), rows)
