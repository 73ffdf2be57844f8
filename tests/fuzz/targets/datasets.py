"""What is trained on, which others write: shards in MosaicML's format, and raw rows."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tempfile
from functools import cache
from pathlib import Path

import pyarrow
from hypothesis import strategies as st
from pyarrow import ipc, parquet
from streaming import MDSWriter

from spotune.errors import JobError
from spotune_trainer.data.manifests import INDEX, MANIFEST, check_agreement, read_manifest
from spotune_trainer.data.preparation.raw_files import FileRange, InputFile, format_of
from spotune_trainer.data.preparation.readers import check_columns, column_types, read_rows
from spotune_trainer.data.shards import ShardedDataset
from tests.fuzz.mutations import changed_bytes, changed_json, changed_lines
from tests.fuzz.target import Target, check_names

ROWS = [{"q": "how many?", "a": "3", "n": 1.5, "tags": ["x"]}, {"q": "où ?", "a": "", "n": None, "tags": []}]
SHARD = "shard.00000.mds"
SHARD_MANIFEST = {
    "tokenizerHash": "0123",
    "options": {"text": {"task": "causal", "maxLength": 64, "labels": []}},
    "splits": {"train": {"samples": 5}},
}


@cache
def _shards() -> tuple[bytes, bytes]:
    """Index and shard of a data set."""
    with tempfile.TemporaryDirectory() as folder:
        columns = {"input_ids": "ndarray:int32", "text": "str", "label": "int"}
        with MDSWriter(out=folder, columns=columns, hashes=["xxh3_64"]) as writer:
            import numpy as np

            for row in range(5):
                writer.write({"input_ids": np.arange(row + 1, dtype=np.int32), "text": f"row {row}", "label": row})
        return (Path(folder) / INDEX).read_bytes(), (Path(folder) / SHARD).read_bytes()


def read_shards(content: tuple[bytes | None, bytes | None, bool]) -> None:
    """Index and shard: samples, or an error that names the place. Without hashes, only decoding notices damage."""
    index, shard = (given or sound for given, sound in zip(content[:2], _shards(), strict=True))
    if content[2]:
        index = index.replace(b'"xxh3_64"', b'"none"')
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "shards"
        source.mkdir()
        (source / INDEX).write_bytes(index)
        (source / SHARD).write_bytes(shard)
        try:
            with ShardedDataset(str(source), Path(folder) / "cache") as dataset:
                for sample in range(min(len(dataset), 20)):
                    dataset[sample]
        except JobError as error:
            check_names(error, str(source), SHARD)


def read_a_manifest(content: bytes) -> None:
    """The manifest beside shards: whether two data sets fit together."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST).write_bytes(content)
        try:
            found = read_manifest(Path(folder))
            check_agreement({"a": found, "b": SHARD_MANIFEST})
        except JobError as error:
            check_names(error, MANIFEST, "dataset.mixture")


@cache
def _raw_files() -> dict[str, bytes]:
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    csv = b'q,a,n\n"how many?",3,1.5\n"o""x\ny",,\n'
    table = pyarrow.Table.from_pylist(ROWS)
    written = {}
    with tempfile.TemporaryDirectory() as folder:
        parquet.write_table(table, f"{folder}/x.parquet")
        for name, new in (("x.arrow", ipc.new_file), ("y.arrow", ipc.new_stream)):
            with new(f"{folder}/{name}", table.schema) as sink:
                sink.write_table(table)
        written = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    zstd = pyarrow.compress(lines, codec="zstd", asbytes=True)
    return {
        "x.jsonl": lines,
        "x.csv": csv,
        "x.jsonl.gz": gzip.compress(lines),
        "x.csv.bz2": bz2.compress(csv),
        "x.jsonl.xz": lzma.compress(lines),
        "x.jsonl.zst": zstd,
        **written,
    }


def read_raw_rows(content: tuple[str, bytes]) -> None:
    """A file of raw rows: rows, or an error that names the file."""
    name, changed = content
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(changed)
        kind = format_of(name)
        assert kind is not None
        file = InputFile(path, kind)
        try:
            check_columns(file, column_types(file), ["q", "a"])
            for number, row in read_rows(FileRange(file, 0, -1, len(changed)), ["q", "a"]):
                assert number > 0
                assert isinstance(row, dict)
        except JobError as error:
            check_names(error, name)


_SHARDS = st.deferred(
    lambda: st.tuples(
        st.none() | changed_json([json.loads(_shards()[0])]), st.none() | changed_bytes([_shards()[1]]), st.booleans()
    )
)
_RAW = st.deferred(
    lambda: st.one_of(
        st.tuples(st.just("x.jsonl"), changed_lines(ROWS)),
        *(st.tuples(st.just(name), changed_bytes([content])) for name, content in _raw_files().items()),
    )
)

TARGETS = (
    Target("shards", "index and shards in MosaicML's format", _SHARDS, read_shards),
    Target("manifest", "manifests beside shards", changed_json([SHARD_MANIFEST]), read_a_manifest, 200),
    Target("rows", "raw rows: JSON lines, CSV, Parquet, Arrow, compressed", _RAW, read_raw_rows),
)
