"""Restoring from shared memory: the committed bytes or the file on the volume, at any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, file_label, open_checkpoint, rank_file
from spotune_trainer.checkpoint.memory.node_memory import NodeMemory, RankMemory
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Segment
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.checkpoint.restore import DamagedMemoryError, RestoredBytes
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.checkpoints import (
    State,
    commit_step,
    make_checkpointers,
    make_state,
    restore,
    wipe_volume,
)

WROTE = 2
TOTAL_BYTES = 3 * 4 * (35 + 3)
"""Of all three states of both parameters."""


class Job:
    """A job whose ranks are all on one node, and commit."""

    def __init__(self, directory: JobDirectory) -> None:
        self.directory = directory
        self.node = NodeMemory()
        claim(directory, None)

    def commit(self, *steps: int, copies: int = 2) -> None:
        memories = self.node.share(WROTE, copies, None)
        ranks = make_checkpointers(self.directory, memories)
        for step in steps:
            commit_step(ranks, step)

    def checkpoint(self, step: int) -> Checkpoint:
        found = open_checkpoint(self.directory.checkpoints / str(CheckpointName(step, 1)))
        assert isinstance(found, Checkpoint)
        return found

    def next_group(self, step: int, ranks: int = WROTE) -> list[RankMemory]:
        return [each for each in self.node.share(ranks, 2, str(CheckpointName(step, 1))) if each is not None]

    def wipe_volume(self, step: int) -> None:
        """Overwrite the files: whoever reads them notices."""
        wipe_volume(self.checkpoint(step))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(JobDirectory(tmp_path))


def holding(memory: RankMemory, checkpoint: Checkpoint) -> dict[str, Segment]:
    return memory.holding(file_label(checkpoint.name, entry) for entry in checkpoint.manifest.files)


def same(first: State, second: State) -> bool:
    return all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_number_of_ranks_restores_from_memory_without_the_volume(job: Job, ranks: int) -> None:
    job.commit(5)
    job.wipe_volume(5)
    state, read = restore(job.checkpoint(5), job.next_group(5, ranks))
    assert same(state, make_state(5))
    assert read == RestoredBytes(memory=TOTAL_BYTES)


@pytest.mark.parametrize("step", [5, 10])
def test_the_last_two_commits_are_in_memory(job: Job, step: int) -> None:
    job.commit(5, 10)
    state, read = restore(job.checkpoint(step), job.next_group(step))
    assert same(state, make_state(step))
    assert read == RestoredBytes(memory=TOTAL_BYTES)


def test_an_older_commit_is_read_from_the_volume(job: Job) -> None:
    job.commit(5, 10, 15)
    state, read = restore(job.checkpoint(5), job.next_group(5))
    assert same(state, make_state(5))
    assert read == RestoredBytes(volume=TOTAL_BYTES)


def test_with_one_copy_a_group_that_is_lost_before_its_next_commit_restores_from_memory(job: Job) -> None:
    job.commit(5, 10, copies=1)
    _, read = restore(job.checkpoint(10), job.next_group(10))
    assert read == RestoredBytes(memory=TOTAL_BYTES)


def test_what_another_node_holds_is_read_from_the_volume_and_verified(job: Job) -> None:
    job.commit(5)
    memories = job.next_group(5)
    first = memories[0]
    held = holding(first, job.checkpoint(5))[rank_file(0)]
    first.node = (held,)
    state, read = restore(job.checkpoint(5), [first])
    assert same(state, make_state(5))
    assert min(read.memory, read.volume) > 0
    assert read.memory + read.volume == TOTAL_BYTES
    path = job.checkpoint(5).path / rank_file(1)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptCheckpointError, match=r"rank-00001\.safetensors has checksum"):
        restore(job.checkpoint(5), [first])


def test_a_flipped_bit_anywhere_in_memory_is_found_and_the_next_group_reads_the_volume(job: Job) -> None:
    job.commit(5)
    memories = job.next_group(5)
    segment = holding(memories[0], job.checkpoint(5))[rank_file(1)]
    label = segment.label
    for position in range(0, segment.content_bytes, 41):
        segment.label = label
        flip(segment, position)
        read = restore_in_two_groups(job, memories)
        flip(segment, position)
        assert read.volume > 0
    segment.label = label
    assert restore(job.checkpoint(5), memories)[1] == RestoredBytes(memory=TOTAL_BYTES)


def restore_in_two_groups(job: Job, memories: list[RankMemory]) -> RestoredBytes:
    """What is read at last: damage in a header is found at once, any other by the check that ends the first group."""
    try:
        state, read = restore(job.checkpoint(5), memories)
    except DamagedMemoryError:
        state, read = restore(job.checkpoint(5), memories)
    assert same(state, make_state(5))
    return read


def test_damaged_memory_and_a_damaged_file_are_a_corrupt_checkpoint(job: Job) -> None:
    job.commit(5)
    memories = job.next_group(5)
    segment = holding(memories[0], job.checkpoint(5))[rank_file(1)]
    flip(segment, segment.content_bytes - 1)
    job.wipe_volume(5)
    with pytest.raises(DamagedMemoryError, match=r"memory of rank-00001\.safetensors is damaged"):
        restore(job.checkpoint(5), memories)
    with pytest.raises(CorruptCheckpointError):
        restore(job.checkpoint(5), memories)


def test_memory_with_another_checksum_than_the_manifest_is_not_used(job: Job) -> None:
    job.commit(5)
    memories = job.next_group(5)
    path = job.checkpoint(5).path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][1]["xxh3"] = "0" * 16
    path.write_text(json.dumps(manifest))
    assert set(holding(memories[0], job.checkpoint(5))) == {rank_file(0)}


def test_without_shared_memory_all_is_read_from_the_volume(job: Job) -> None:
    job.commit(5, copies=0)
    state, read = restore(job.checkpoint(5), [None, None])
    assert same(state, make_state(5))
    assert read == RestoredBytes(volume=TOTAL_BYTES)


def test_each_file_is_logged_with_its_source(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.commit(5)
    caplog.set_level("INFO")
    restore(job.checkpoint(5), job.next_group(5))
    assert "rank-00000.safetensors from memory of this node" in caplog.text
    caplog.clear()
    restore(job.checkpoint(5), [None, None])
    assert "rank-00001.safetensors from the volume" in caplog.text


def flip(segment: Segment, position: int) -> None:
    with segment.map() as mapped:
        mapped[LABEL_BYTES + position] ^= 4
