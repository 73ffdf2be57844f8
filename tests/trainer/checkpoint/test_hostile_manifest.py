"""Manifests that others have edited: a torn or corrupt checkpoint, and neither a crash nor all memory. By fuzzing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotune_trainer.checkpoint.layout import MANIFEST, Checkpoint, UnusableCheckpoint, open_checkpoint
from spotune_trainer.checkpoint.reader import CorruptCheckpointError, read_parameters
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.checkpoints import commit_checkpoint


def edited(folder: Path, **changes: Any) -> Checkpoint | UnusableCheckpoint:
    directory = JobDirectory(folder)
    path = directory.checkpoints / str(commit_checkpoint(directory, 10, 1))
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | changes))
    return open_checkpoint(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"worldSize": "two"},
        {"time": 1e300},
        {"files": [{"name": "../../../etc/passwd", "size": 3, "xxh3": ""}]},
        {"files": [{"name": "x" * 300, "size": 3, "xxh3": ""}]},
        {"files": [{"name": "x", "size": -3, "xxh3": ""}]},
        {"evaluations": [3]},
        {"unheard": 1, "time": None},
    ],
)
def test_edited_manifest_is_torn(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = edited(tmp_path, **changes)
    assert isinstance(found, UnusableCheckpoint)
    assert found.reason.startswith("not a manifest")
    assert not found.is_newer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2, "unheard": 1}, "manifest of format 2, this version reads format 1"),
        ({"unheard": 1}, "manifest with unheard, a field that this version does not know"),
    ],
)
def test_manifest_of_a_newer_version_is_told_from_a_damaged_one(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    found = edited(tmp_path, **changes)
    assert isinstance(found, UnusableCheckpoint)
    assert (found.is_newer, found.reason) == (True, reason)


@pytest.mark.parametrize("shape", [[10**12], [2**40, 2**40], [2**62]])
def test_shape_that_no_file_can_hold_takes_no_memory(tmp_path: Path, shape: list[int]) -> None:
    found = edited(tmp_path, parameters={"layer.bias": shape})
    assert isinstance(found, Checkpoint)
    with pytest.raises(CorruptCheckpointError, match="more than all files of the checkpoint"):
        read_parameters(found)
