"""Shards in a bucket: the bytes of a folder, through kills, on a disk that is smaller than they are."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.data.preparation.prepare import PrepareOptions, PrepareProgress, prepare
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.data.stores.find import open_store
from spotune_trainer.data.stores.stored_folder import StoredFolder
from tests.trainer.support.buckets import WRITABLE, Bucket

# google-api-core warns of a package for gRPC, which the client of the store does not use.
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")

Patch = pytest.MonkeyPatch

TEXT = TextOptions("causal", "{q}", "{a}")
OPTIONS = PrepareOptions(TEXT, processes=1, part_size=400, shard_size=700)
SPLIT = dataclasses.replace(OPTIONS, eval_fraction=0.3)
FILES = 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPOTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A folder of five files, each of which is one part."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for number in range(FILES):
        rows = [{"q": f"question {number} {row}", "a": f"answer {row}"} for row in range(8)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.node.name.partition("[")[0])


@pytest.fixture
def url(bucket: Bucket, prefix: str) -> str:
    return f"{bucket.url}/{prefix}"


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are written to buckets."""
    real, names = StoredFolder.write, list[str]()

    def write(self: StoredFolder, name: str, content: bytes) -> None:
        names.append(name)
        real(self, name, content)

    monkeypatch.setattr(StoredFolder, "write", write)
    return names


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def samples(url: str, cache: Path) -> list[bytes]:
    with ShardedDataset(url, cache) as dataset:
        return [dataset[number]["input_ids"].tobytes() for number in range(len(dataset))]


def ending_after(parts: int) -> Callable[[PrepareProgress], None]:
    def end(done: PrepareProgress) -> None:
        if done.parts_done == parts:
            raise KeyboardInterrupt

    return end


@pytest.mark.parametrize("bucket", WRITABLE, indirect=True)
@pytest.mark.parametrize(
    "options", [pytest.param(OPTIONS, id="whole"), pytest.param(SPLIT, id="split", marks=pytest.mark.long)]
)
def test_a_bucket_gets_the_files_of_a_folder_and_nothing_stays_on_the_node(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    raw: Path,
    url: str,
    bucket: Bucket,
    cache: Path,
    options: PrepareOptions,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.callspec.id
    local = prepare([raw], tmp_path / "local", options, tokenizer)
    stored = prepare([raw], f"{url}/{name}/", options, tokenizer)
    files = content(local.folder)
    assert len([name for name in files if name.endswith(".mds")]) > FILES
    assert bucket.below(f"{url.removeprefix(bucket.url + '/')}/{name}") == files
    assert stored.manifest == local.manifest
    assert stored.place == f"{url}/{name}"
    assert content(cache) == {}
    for split in options.folders.values():
        folder = f"{url}/{name}/{split}".removesuffix("/.")
        assert samples(folder, tmp_path / "shards") == samples(str(local.folder / split), tmp_path / "shards")
    assert prepare([raw], f"{url}/{name}", options, tokenizer).reused


@pytest.mark.parametrize("bucket", WRITABLE, indirect=True)
def test_another_machine_goes_on_with_the_parts_that_are_missing(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    raw: Path,
    url: str,
    prefix: str,
    bucket: Bucket,
    writes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = prepare([raw], tmp_path / "local", OPTIONS, tokenizer)
    with pytest.raises(KeyboardInterrupt):
        prepare([raw], url, OPTIONS, tokenizer, progress=ending_after(3))
    assert not {"index.json", "manifest.json"} & set(bucket.below(prefix))
    writes.clear()
    monkeypatch.setenv("SPOTUNE_CACHE", str(tmp_path / "cache of another machine"))
    again = prepare([raw], url, OPTIONS, tokenizer)
    parts = [name.rpartition("/")[2] for name in writes if "/part-" in name]
    assert parts == ["part-00003.json", "part-00004.json"]
    assert bucket.below(prefix) == content(local.folder)
    assert again.manifest == local.manifest


@pytest.mark.slow
def test_a_kill_at_any_write_leaves_no_index_without_its_shards_and_the_next_run_goes_on(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    raw: Path,
    bucket: Bucket,
    url: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw, options = raw / "[01].jsonl", dataclasses.replace(OPTIONS, shard_size=1 << 20)
    files = content(prepare([raw], tmp_path / "local", options, tokenizer).folder)
    changes = {name: getattr(StoredFolder, name) for name in ("write", "delete")}
    left = 0

    def count(name: str) -> Callable[..., Any]:
        def change(self: StoredFolder, *arguments: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            changes[name](self, *arguments)

        return change

    for name in changes:
        monkeypatch.setattr(StoredFolder, name, count(name))
    kills = 0
    while True:
        left = kills
        try:
            prepare([raw], f"{url}/{kills}", options, tokenizer)
            break
        except KeyboardInterrupt:
            pass
        found = bucket.below(f"{prefix}/{kills}")
        if "index.json" in found:
            assert set(files) - {"manifest.json"} <= set(found)
        left = 1 << 30
        prepare([raw], f"{url}/{kills}", options, tokenizer)
        assert bucket.below(f"{prefix}/{kills}") == files
        kills += 1
    assert kills > 10


def test_other_shards_are_replaced_only_on_request_and_are_not_read_meanwhile(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, raw: Path, bucket: Bucket, url: str, prefix: str
) -> None:
    bucket.put(f"{prefix}/notes.txt", b"mine")
    with pytest.raises(JobError, match=f"{url} exists and was not written by `spotune shard`"):
        prepare([raw], url, OPTIONS, tokenizer)
    assert list(bucket.below(prefix)) == ["notes.txt"]
    url, prefix = f"{url}/own", f"{prefix}/own"
    prepare([raw], url, SPLIT, tokenizer)
    bucket.put(f"{prefix}/notes.txt", b"mine")
    with pytest.raises(JobError, match=f"{url} has shards that were made from other input, .* with --overwrite"):
        prepare([raw], url, OPTIONS, tokenizer)
    assert "train/index.json" in bucket.below(prefix)
    large = dataclasses.replace(OPTIONS, overwrite=True, shard_size=1 << 20)
    with pytest.raises(KeyboardInterrupt):
        prepare([raw], url, large, tokenizer, progress=ending_after(1))
    assert not [name for name in bucket.below(prefix) if name.endswith(("index.json", "manifest.json"))]
    other = dataclasses.replace(large, shard_size=1 << 19)  # what the killed run has uploaded is of no use
    local = prepare([raw], tmp_path / "local", other, tokenizer)
    prepare([raw], url, other, tokenizer)
    assert bucket.below(prefix) == content(local.folder) | {"notes.txt": b"mine"}


def test_shards_that_something_else_deletes_are_written_again(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, raw: Path, bucket: Bucket, url: str, prefix: str
) -> None:
    def delete(done: PrepareProgress) -> None:
        if done.parts_done == 3:
            StoredFolder(url).delete("shard.00000.mds")

    with pytest.raises(InfrastructureError, match=f"shards of 1 parts in {url} were deleted or replaced"):
        prepare([raw], url, OPTIONS, tokenizer, progress=delete)
    assert "index.json" not in bucket.below(prefix)
    local = prepare([raw], tmp_path / "local", OPTIONS, tokenizer)
    prepare([raw], url, OPTIONS, tokenizer)
    assert bucket.below(prefix) == content(local.folder)


def test_a_wrong_row_is_named_and_the_next_run_replaces_what_was_uploaded(
    tokenizer: PreTrainedTokenizerBase, raw: Path, bucket: Bucket, url: str, prefix: str, cache: Path
) -> None:
    path = raw / "3.jsonl"
    right = path.read_text()
    path.write_text('{"q": "no answer"}\n')
    with pytest.raises(JobError, match=r"3\.jsonl:1: no column 'a'"):
        prepare([raw], url, OPTIONS, tokenizer)
    assert content(cache) == {}
    path.write_text(right)
    prepare([raw], url, OPTIONS, tokenizer)
    assert not [name for name in bucket.below(prefix) if name.startswith(".")]


@pytest.mark.parametrize("place", ["hf://datasets/me/rows", "https://host/shards", "ftp://host/shards", "s3://"])
def test_a_place_that_cannot_be_written_to_is_refused(
    tokenizer: PreTrainedTokenizerBase, raw: Path, place: str
) -> None:
    with pytest.raises(JobError, match=f"{place}: shards are written to s3://, gs://, az:// with the name of a bucket"):
        prepare([raw], place, OPTIONS, tokenizer)


@pytest.mark.usefixtures("bucket")
def test_a_missing_bucket_is_named(tokenizer: PreTrainedTokenizerBase, raw: Path) -> None:
    with pytest.raises(JobError, match=r"s3://absent/shards is missing, or access is denied .* set AWS_ACCESS_KEY_ID"):
        prepare([raw], "s3://absent/shards", OPTIONS, tokenizer)


def test_a_store_that_refuses_writes_for_a_while_is_asked_again(
    tokenizer: PreTrainedTokenizerBase,
    raw: Path,
    bucket: Bucket,
    url: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = type(open_store("s3"))
    real, attempts = store.upload, list[str]()  # type: ignore[attr-defined]

    def upload(self: Any, of: str, key: str, content: bytes) -> None:
        attempts.append(key)
        if attempts.count(key) < 3:
            raise ConnectionResetError
        real(self, of, key, content)

    monkeypatch.setattr(store, "upload", upload)
    monkeypatch.setattr("spotune_trainer.data.stores.find.PAUSES_SECONDS", (0, 0, 0))
    prepare([raw], url, OPTIONS, tokenizer)
    assert len(attempts) == 3 * len(set(attempts))
    assert "index.json" in bucket.below(prefix)


DISK_BYTES = 600_000
ON_A_SMALL_DISK = """
import os, shutil, sys
from pathlib import Path
from transformers import AutoTokenizer
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.rows.options import TextOptions
source, output, tokenizer, disk, processes = sys.argv[1:]
assert shutil.disk_usage(disk).total < 700_000
options = PrepareOptions(TextOptions("causal", "{q}", "{a}"), processes=int(processes), part_size=100)
prepare([source], output, options, AutoTokenizer.from_pretrained(tokenizer))
assert not [path for path in Path(disk).rglob("*") if path.is_file() and path.name != "lock"]
"""


def can_mount() -> bool:
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small disk")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_rows_and_shards_that_are_larger_than_the_disk_are_prepared(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, bucket: Bucket, prefix: str, processes: str
) -> None:
    prefix = f"{prefix}/{processes}"
    raw, disk = tmp_path / "raw", tmp_path / "disk"
    for folder in (raw, disk):
        folder.mkdir()
    for number in range(24):
        rows = [{"q": f"{number} {row} " + "how many " * 40, "a": "select count " * 20} for row in range(40)]
        (raw / f"{number:02d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = bucket.upload(raw, f"{prefix}/rows")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = [source, f"{bucket.url}/{prefix}/shards", str(tmp_path / "tokenizer"), str(disk), processes]
    mount = f'mount -t tmpfs -o size={DISK_BYTES} tmpfs "$0" && SPOTUNE_CACHE="$0" exec "$@"'
    run = [sys.executable, "-c", ON_A_SMALL_DISK, *words]
    subprocess.run(["unshare", "--mount", "sh", "-c", mount, str(disk), *run], check=True)
    shards = bucket.below(f"{prefix}/shards")
    each_file = max(path.stat().st_size for path in raw.iterdir())
    options = PrepareOptions(TEXT, processes=1, part_size=each_file)
    local = prepare([raw], tmp_path / "local", options, tokenizer)
    made = {name: content for name, content in content(local.folder).items() if name.endswith(".mds")}
    assert sum(map(len, made.values())) > 2 * DISK_BYTES
    assert {name: content for name, content in shards.items() if name.endswith(".mds")} == made
    assert shards["index.json"] == (local.folder / "index.json").read_bytes()
