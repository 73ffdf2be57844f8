"""Data sets of strangers: an index can neither run code, nor name files outside of its folder, nor take all memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import MDSWriter

from spotune.errors import DataError, JobError
from spotune_trainer.data.manifests import INDEX
from spotune_trainer.data.shards import ShardedDataset

SHARD = "shard.00000.mds"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    with MDSWriter(out=str(folder), columns={"ids": "ndarray:int32", "text": "str"}) as writer:
        for row in range(3):
            writer.write({"ids": np.arange(row + 1, dtype=np.int32), "text": f"row {row}"})
    return folder


def edit(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["shards"][0].update(changes)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "x" * 3000])
def test_shard_outside_of_the_folder_is_refused(shards: Path, name: str) -> None:
    """A shard of a store is written to the cache under its name: without the check, anywhere on the machine."""
    edit(shards, raw_data={"basename": name, "bytes": 100, "hashes": {}})
    with pytest.raises(JobError, match=r"index\.json of .* is not the name of a file in the folder of the index"):
        ShardedDataset(str(shards), shards.parent / "cache")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column_encodings": ["pkl", "str"]}, "unsafe type"),
        ({"column_encodings": ["ndarray:int32"]}, "2 columns have 1 encodings"),
        ({"column_encodings": [None, "str"]}, "unknown encoding"),
        ({"column_encodings": ["ndarray:nt32", "str"]}, "cannot be read"),
        ({"column_sizes": ["x", None]}, "has the size 'x'"),
        ({"samples": 10**12}, "cannot hold 1000000000000 samples"),
        ({"samples": "3"}, "cannot be read"),
        ({"raw_data": {"basename": SHARD, "bytes": "x", "hashes": {}}}, "has no size or no hashes"),
    ],
)
def test_edited_index_is_an_error_that_names_it(shards: Path, changes: dict[str, Any], message: str) -> None:
    edit(shards, **changes)
    with pytest.raises(JobError, match=rf"index\.json of .*{message}"):
        ShardedDataset(str(shards), shards.parent / "cache")


def test_sample_that_cannot_be_decoded_names_its_shard(shards: Path) -> None:
    edit(shards, hashes=[])
    content = bytearray((shards / SHARD).read_bytes())
    content[4:8] = b"\xff\xff\xff\x7f"  # the first sample begins far beyond the end
    (shards / SHARD).write_bytes(bytes(content))
    dataset = ShardedDataset(str(shards), shards.parent / "cache")
    with pytest.raises(DataError, match=rf"sample 0 of the shard .*{SHARD} cannot be decoded"):
        dataset[0]
