"""Raw rows in a bucket: the same shards as from a disk, one copy on the node at a time, nothing read twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import ipc, parquet
from transformers import PreTrainedTokenizerBase

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.cli.init.columns import profile_columns
from spotune_trainer.data.preparation.check import check_rows
from spotune_trainer.data.preparation.prepare import PreparedDataset, PrepareOptions, PrepareProgress, prepare
from spotune_trainer.data.preparation.preview import preview_row
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.stores import find
from spotune_trainer.data.stores.stored_file import Store, StoredFile
from tests.trainer.support.buckets import KINDS, WRITABLE, Bucket

# google-api-core warns of a package for gRPC, which the client of the store does not use.
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")

TEXT = TextOptions("causal", "{q}", "{a}")
OPTIONS = PrepareOptions(TEXT, processes=1, part_size=100)
FILES = 6

Upload = Callable[[Path], str]

in_every_kind_of_bucket = pytest.mark.parametrize("bucket", KINDS, indirect=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPOTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def upload(bucket: Bucket, request: pytest.FixtureRequest) -> Upload:
    """A function that uploads the files of a folder, and returns its URL."""
    prefix = request.node.name.partition("[")[0]
    return lambda folder: bucket.upload(folder, prefix)


@pytest.fixture
def downloads(bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were downloaded. Each download finds no other copy on the node."""
    kind = type(find.open_store(bucket.url.partition(":")[0]))
    real, names = kind.download, list[str]()

    def download(self: Store, file: StoredFile, target: Path) -> None:
        assert not [path for path in cache.rglob("*") if path.is_file() and path.name != "lock"]
        names.append(target.name)
        real(self, file, target)

    monkeypatch.setattr(kind, "download", download)
    return names


def rows(number: int) -> list[dict[str, str]]:
    return [{"q": f"question {number} {row}", "a": f"answer {row}"} for row in range(8)]


def write(folder: Path, kind: str) -> Path:
    folder.mkdir()
    for number in range(FILES):
        path, table = folder / f"{number}.{kind}", pyarrow.Table.from_pylist(rows(number))
        if kind == "parquet":
            parquet.write_table(table, path, row_group_size=3)
        elif kind == "arrow":
            with ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table)
        elif kind == "csv":
            path.write_text("q,a\n" + "".join(f"{row['q']},{row['a']}\n" for row in rows(number)))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows(number)))
    return folder


def shards(dataset: PreparedDataset) -> dict[str, str]:
    """Hash of each shard and of the index."""
    paths = [path for path in sorted(dataset.folder.iterdir()) if path.name != "manifest.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "arrow"])
@in_every_kind_of_bucket
def test_a_bucket_gives_the_shards_of_a_folder_with_one_file_at_a_time_on_the_node(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, upload: Upload, downloads: list[str], cache: Path, kind: str
) -> None:
    folder = write(tmp_path / "raw", kind)
    options = dataclasses.replace(OPTIONS, part_size=1 << 20)  # all files in one part, as is the way of small ones
    local = prepare([folder], tmp_path / "local", options, tokenizer)
    stored = prepare([f"{upload(folder)}/*.{kind}"], tmp_path / "stored", options, tokenizer)
    assert shards(stored) == shards(local)
    assert stored.manifest["splits"]["train"]["samples"] == FILES * 8
    assert downloads == [f"{number}.{kind}" for number in range(FILES)]
    assert [path.name for path in (cache / "raw-rows").iterdir()] == ["lock"]


TWO_PROCESSES = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
from spotune_trainer.data.rows.options import TextOptions
source, folder, tokenizer = sys.argv[1:]
options = PrepareOptions(TextOptions("causal", "{q}", "{a}"), processes=2, part_size=100)
prepare([source], Path(folder), options, AutoTokenizer.from_pretrained(tokenizer))
"""


@pytest.mark.slow
@pytest.mark.long
def test_processes_make_the_same_shards(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, upload: Upload) -> None:
    source = upload(write(tmp_path / "raw", "jsonl"))
    one = prepare([source], tmp_path / "one", OPTIONS, tokenizer)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    # In a process of its own, because the fork server of this one may have the environment of an earlier test.
    two = [source, str(tmp_path / "two"), str(tmp_path / "tokenizer")]
    subprocess.run([sys.executable, "-c", TWO_PROCESSES, *two], check=True)
    assert shards(one) == shards(dataclasses.replace(one, place=str(tmp_path / "two")))


@in_every_kind_of_bucket
def test_a_killed_preparation_downloads_only_the_missing_files(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, upload: Upload, downloads: list[str]
) -> None:
    source = upload(write(tmp_path / "raw", "jsonl"))
    undisturbed = prepare([source], tmp_path / "undisturbed", OPTIONS, tokenizer)
    assert len(downloads) == FILES
    downloads.clear()

    def end(done: PrepareProgress) -> None:
        if done.parts_done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "killed", OPTIONS, tokenizer, progress=end)
    assert downloads == [f"{number}.jsonl" for number in range(4)]
    downloads.clear()
    again = prepare([source], tmp_path / "killed", OPTIONS, tokenizer)
    assert downloads == ["4.jsonl", "5.jsonl"]
    assert shards(again) == shards(undisturbed)
    assert again.manifest == undisturbed.manifest
    assert prepare([source], tmp_path / "killed", OPTIONS, tokenizer).reused
    assert downloads == ["4.jsonl", "5.jsonl"], "the versions were enough"


def test_a_check_of_the_first_rows_downloads_only_their_files(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, upload: Upload, downloads: list[str], cache: Path
) -> None:
    source = upload(write(tmp_path / "raw", "jsonl"))
    found = check_rows([source], OPTIONS, tokenizer, max_rows=10)
    assert (found.rows, found.complete, found.problems) == (10, False, ())
    assert downloads == ["0.jsonl", "1.jsonl"]
    assert [path.name for path in (cache / "raw-rows").iterdir()] == ["lock"]


@pytest.mark.parametrize("bucket", WRITABLE, indirect=True)
def test_replaced_files_are_prepared_again_from_the_start(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, upload: Upload, bucket: Bucket
) -> None:
    source = upload(write(tmp_path / "raw", "jsonl"))
    key = f"{source.removeprefix(bucket.url + '/')}/5.jsonl"

    def replace(done: PrepareProgress) -> None:
        if done.parts_done == 2:
            bucket.put(key, b'{"q": "new", "a": "rows"}\n')

    with pytest.raises(InfrastructureError, match=r"5\.jsonl was replaced while it was read: run it again"):
        prepare([source], tmp_path / "out", OPTIONS, tokenizer, progress=replace)
    assert prepare([source], tmp_path / "out", OPTIONS, tokenizer).manifest["splits"]["train"]["documents"] == 41
    bucket.put(key, b'{"q": "newer", "a": "rows"}\n')
    with pytest.raises(JobError, match="--overwrite"):
        prepare([source], tmp_path / "out", OPTIONS, tokenizer)


@pytest.mark.parametrize("bucket", ["hf"], indirect=True)
def test_a_commit_to_the_hub_changes_nothing_of_a_preparation_that_has_begun(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, upload: Upload, bucket: Bucket
) -> None:
    source = upload(write(tmp_path / "raw", "jsonl"))
    key = f"{source.removeprefix(bucket.url + '/')}/5.jsonl"
    undisturbed = prepare([source], tmp_path / "undisturbed", OPTIONS, tokenizer)

    def replace(done: PrepareProgress) -> None:
        if done.parts_done == 2:
            bucket.put(key, b'{"q": "new", "a": "rows"}\n')

    assert shards(prepare([source], tmp_path / "out", OPTIONS, tokenizer, progress=replace)) == shards(undisturbed)
    with pytest.raises(JobError, match="--overwrite"):
        prepare([source], tmp_path / "out", OPTIONS, tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("7.jsonl", b'{"q": "x"}\n', r"s3://bucket/.*/7\.jsonl:1: no column 'a'"),
        ("7.jsonl.gz", b"{}", r"s3://bucket/.*/7\.jsonl\.gz is not a complete gzip file"),
        ("7.csv", b"", r"mixes file formats: s3://bucket/.*/5\.jsonl and s3://bucket/.*/7\.csv"),
    ],
)
def test_error_names_the_url_of_a_broken_file(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    upload: Upload,
    cache: Path,
    name: str,
    content: bytes,
    message: str,
) -> None:
    folder = write(tmp_path / "raw", "jsonl")
    (folder / name).write_bytes(content)
    source = upload(folder)
    with pytest.raises(JobError, match=message):
        prepare([f"{source}/[0-5].jsonl", f"{source}/{name}"], tmp_path / "out", OPTIONS, tokenizer)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_column_that_a_parquet_file_lacks_is_named_with_the_url(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, upload: Upload
) -> None:
    source = upload(write(tmp_path / "raw", "parquet"))
    options = dataclasses.replace(OPTIONS, text=TextOptions("causal", "{question}", "{a}"))
    with pytest.raises(JobError, match=r"s3://bucket/.*/0\.parquet: no column 'question'; the file has 'q', 'a'"):
        prepare([source], tmp_path / "out", options, tokenizer)


def test_rows_of_a_bucket_are_shown_and_profiled(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, upload: Upload, cache: Path
) -> None:
    source = upload(write(tmp_path / "raw", "parquet"))
    shown = preview_row([source], 10, TEXT, tokenizer)
    assert shown.location == f"{source}/1.parquet, row 2"
    assert "".join(span.text for span in shown.spans).startswith("question 1 1")
    count, columns = profile_columns(source)
    assert (count, [column.name for column in columns]) == (FILES * 8, ["a", "q"])
    assert [path.name for path in (cache / "raw-rows").iterdir()] == ["lock"]
