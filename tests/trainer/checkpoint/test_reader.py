"""What a failed read means: a damaged checkpoint is skipped, and one on a volume that fails is tried again."""

from __future__ import annotations

import json
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from spotune.errors import InfrastructureError
from spotune.job import TrainingSpec
from spotune.retry import FailureCause
from spotune_trainer.checkpoint.fragment import EMA, MASTER, SCHEDULE_FREE_BASE, Fragment
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, open_checkpoint
from spotune_trainer.checkpoint.reader import (
    CheckpointReader,
    CorruptCheckpointError,
    UnreadableCheckpointError,
    read_ema,
    read_parameters,
    read_trained_weights,
    verify,
)
from spotune_trainer.checkpoint.writer import commit, write_fragments
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.failures import describe
from tests.trainer.support.checkpoints import commit_checkpoint, make_manifest

FILE = "rank-00000.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    directory = JobDirectory(tmp_path)
    found = open_checkpoint(directory.checkpoints / str(commit_checkpoint(directory, 10, 1)))
    assert isinstance(found, Checkpoint)
    return found


def fail_reads(path: Path) -> bytes:
    """Replace a file by one that the kernel opens, and of which every read is an EIO; returns what it has held."""
    content = path.read_bytes()
    path.unlink()
    path.symlink_to("/proc/self/mem")
    return content


def header_of(content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    return content[: 8 + length]


@pytest.mark.parametrize("read", [verify, read_parameters])
def test_a_read_error_of_the_volume_is_retried_as_infrastructure(checkpoint: Checkpoint, read: object) -> None:
    assert callable(read)
    path = checkpoint.path / FILE
    fail_reads(path)
    with pytest.raises(UnreadableCheckpointError) as raised:
        read(checkpoint)
    assert str(raised.value) == f"{path} cannot be read (Input/output error): is the volume available?"
    failure = describe(0, pickle.loads(pickle.dumps(raised.value)))
    assert (failure.checkpoint, failure.cause) == (None, FailureCause.INFRASTRUCTURE), "it is not skipped"


def test_a_read_error_of_the_data_is_retried_as_infrastructure(checkpoint: Checkpoint) -> None:
    header = header_of(fail_reads(checkpoint.path / FILE))
    reader = CheckpointReader(checkpoint, headers={FILE: header})
    with pytest.raises(InfrastructureError, match=f"{FILE} cannot be read"):
        reader.read("layer.bias", "fp32", 0, torch.empty(3))


def test_a_file_that_cannot_be_opened_is_retried_as_infrastructure(checkpoint: Checkpoint) -> None:
    path = checkpoint.path / FILE
    path.unlink()
    path.symlink_to(path)  # ELOOP
    for read in (verify, read_parameters):
        with pytest.raises(UnreadableCheckpointError):
            read(checkpoint)


@pytest.mark.parametrize("read", [verify, read_parameters])
def test_a_missing_file_is_corrupt(checkpoint: Checkpoint, read: object) -> None:
    assert callable(read)
    (checkpoint.path / FILE).unlink()
    with pytest.raises(CorruptCheckpointError, match="No such file"):
        read(checkpoint)


def test_a_file_that_has_become_shorter_is_corrupt(checkpoint: Checkpoint) -> None:
    reader = CheckpointReader(checkpoint)
    content = (checkpoint.path / FILE).read_bytes()
    (checkpoint.path / FILE).write_bytes(content[: len(header_of(content))])
    with pytest.raises(CorruptCheckpointError, match="it ends at byte"):
        reader.read("layer.bias", "fp32", 0, torch.empty(3))


@pytest.mark.parametrize(
    ("offsets", "length"),
    [([-(10**6), -(10**6) + 12], None), ([10**6, 10**6 + 12], None), ([2**70, 2**70 + 12], None), ([0, 12], 2**40)],
)
def test_a_damaged_header_is_corrupt(checkpoint: Checkpoint, offsets: list[int], length: int | None) -> None:
    """Positions outside of the file would be an error of the kernel, and a length would take all memory."""
    header = json.dumps({"layer.bias|0|fp32": {"data_offsets": offsets}}).encode()
    path = checkpoint.path / FILE
    start = struct.pack("<Q", len(header) if length is None else length) + header
    path.write_bytes(start + path.read_bytes()[len(start) :])
    with pytest.raises(CorruptCheckpointError, match=f"{FILE} cannot be read"):
        CheckpointReader(checkpoint)


def test_lack_of_memory_is_not_taken_for_damage(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr("os.pread", allocate)
    with pytest.raises(MemoryError):
        CheckpointReader(checkpoint)


def test_each_tensor_that_is_read_is_progress(tmp_path: Path) -> None:
    """Of a slow volume, all of them together may take longer than `retry.hangTimeout`."""
    directory, name = JobDirectory(tmp_path), CheckpointName(1, 1)
    states = {state: torch.zeros(3) for state in (MASTER, SCHEDULE_FREE_BASE, EMA)}
    write_fragments(directory.checkpoints / str(name), 0, [Fragment("bias", 0, states)])
    commit(directory, name, 1, lambda entries: replace(make_manifest(name, entries), parameters={"bias": (3,)}))
    found = open_checkpoint(directory.checkpoints / str(name))
    assert isinstance(found, Checkpoint)
    training = TrainingSpec(epochs=1, optimizer="schedule_free_adamw", scheduler="constant")
    beats = Mock()
    read_trained_weights(found, training, beats)
    assert beats.call_count == 2, "averages are computed from two states"
    read_ema(found, beats)
    assert beats.call_count == 3
