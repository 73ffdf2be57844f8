"""Restoring from the memory of other nodes: the committed bytes, or else the file on the volume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spotune.plan.devices import machine_memory_bytes
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, file_label, open_checkpoint, rank_file
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.memory.peer_connection import PeerConnection, PeerError
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.checkpoint.restore import Restore, RestoredBytes
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.checkpoints import (
    State,
    commit_step,
    fragments_of_rank,
    make_checkpointers,
    make_state,
    restore,
    wipe_volume,
)
from tests.trainer.support.peers import SECRET, Node, nodes

NODES = 3
TOTAL_BYTES = 3 * 4 * (35 + 3)
"""Of all three states of both parameters."""


class Job:
    """A job with a rank on each of several nodes, which copy their commits to the next one."""

    def __init__(self, directory: JobDirectory, started: list[Node]) -> None:
        self.directory = directory
        self.nodes = started
        claim(directory, None)

    def commit(self, *steps: int, copied: bool = True) -> None:
        memories = [node.begin(1, None, *self.nodes)[0] for node in self.nodes]
        ranks = make_checkpointers(self.directory, memories)
        for step in steps:
            commit_step(ranks, step)
            if copied:
                self.copy()

    def copy(self) -> None:
        for node, following in zip(self.nodes, self.nodes[1:] + self.nodes[:1], strict=True):
            assert node.sender(following, self.directory.checkpoints).send_newest()

    def replace(self, *numbers: int) -> None:
        """These nodes are lost, and others start in their places."""
        for number in numbers:
            self.nodes[number].lose()
            self.nodes[number] = Node()

    def checkpoint(self, step: int) -> Checkpoint:
        found = open_checkpoint(self.directory.checkpoints / str(CheckpointName(step, 1)))
        assert isinstance(found, Checkpoint)
        return found

    def next_group(self, step: int, secret: bytes = SECRET) -> list[RankMemory]:
        name = str(CheckpointName(step, 1))
        return [
            node.begin(2, name, *(other for other in self.nodes if other is not node), secret=secret)[0]
            for node in self.nodes
        ]

    def wipe_volume(self, step: int) -> None:
        """Overwrite the files: whoever reads them notices."""
        wipe_volume(self.checkpoint(step))

    def label(self, step: int, rank: int) -> Label:
        (entry,) = (entry for entry in self.checkpoint(step).manifest.files if entry.name == rank_file(rank))
        return file_label(CheckpointName(step, 1), entry)

    def copy_of(self, step: int, rank: int) -> Segment:
        """What the next node keeps of a rank's file."""
        segment = self.nodes[(rank + 1) % NODES].copies.find(self.label(step, rank))
        assert segment is not None
        return segment


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with nodes(NODES) as started:
        yield Job(JobDirectory(tmp_path), started)


def same(first: State, second: State) -> bool:
    return all(torch.equal(first[name], second[name]) for name in second)


def of_rank(rank: int) -> int:
    """Bytes of the fragments of a rank, all of which one file holds."""
    states = (state for fragment in fragments_of_rank(make_state(), NODES, rank) for state in fragment.states.values())
    return sum(4 * state.numel() for state in states)


def flip(segment: Segment, position: int) -> None:
    with segment.map() as mapped:
        mapped[LABEL_BYTES + position] ^= 4


@pytest.mark.parametrize("lost", range(NODES))
def test_state_of_a_lost_node_is_read_from_its_peer_without_the_volume(job: Job, lost: int) -> None:
    job.commit(5)
    job.replace(lost)
    job.wipe_volume(5)
    state, read = restore(job.checkpoint(5), job.next_group(5))
    assert same(state, make_state(5))
    assert read == RestoredBytes(memory=TOTAL_BYTES - of_rank(lost), peer=of_rank(lost))


def test_smaller_group_restores_from_the_nodes_that_are_left_without_the_volume(job: Job) -> None:
    job.commit(5)
    job.nodes.pop(1).lose()
    job.wipe_volume(5)
    state, read = restore(job.checkpoint(5), job.next_group(5))
    assert same(state, make_state(5))
    assert min(read.memory, read.peer) > 0
    assert read.memory + read.peer == TOTAL_BYTES


def test_file_is_read_from_the_volume_if_both_of_its_holders_are_lost(job: Job) -> None:
    job.commit(5)
    job.replace(0, 1)
    state, read = restore(job.checkpoint(5), job.next_group(5))
    assert same(state, make_state(5))
    assert read == RestoredBytes(memory=of_rank(2), peer=of_rank(1), volume=of_rank(0))


def test_copy_of_an_earlier_commit_is_not_used(job: Job) -> None:
    """The node was lost after the commit, and before it was copied."""
    job.commit(5)
    job.commit(10, copied=False)
    job.replace(0)
    state, read = restore(job.checkpoint(10), job.next_group(10))
    assert same(state, make_state(10))
    assert read == RestoredBytes(memory=TOTAL_BYTES - of_rank(0), volume=of_rank(0))


def test_flipped_bit_anywhere_in_a_copy_falls_back_to_the_volume(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.commit(5)
    job.replace(0)
    memories, segment = job.next_group(5), job.copy_of(5, rank=0)
    for position in range(0, segment.content_bytes, 67):
        caplog.clear()
        flip(segment, position)
        state, read = restore(job.checkpoint(5), memories)
        flip(segment, position)
        assert same(state, make_state(5))
        assert read.volume >= of_rank(0)
        assert "is not read from the memory of node" in caplog.text or "is damaged" in caplog.text
    assert restore(job.checkpoint(5), memories)[1].volume == 0


def test_damaged_copy_and_a_damaged_file_are_a_corrupt_checkpoint(job: Job) -> None:
    job.commit(5)
    job.replace(0)
    memories = job.next_group(5)
    flip(job.copy_of(5, rank=0), 300)
    job.wipe_volume(5)
    with pytest.raises(CorruptCheckpointError):
        restore(job.checkpoint(5), memories)


def test_copy_with_another_checksum_than_the_manifest_is_not_used(job: Job) -> None:
    job.commit(5)
    job.replace(0)
    memories = job.next_group(5)
    path = job.checkpoint(5).path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][0]["xxh3"] = "0" * 16
    path.write_text(json.dumps(manifest))
    with pytest.raises(CorruptCheckpointError, match="its manifest records 0000000000000000"):
        restore(job.checkpoint(5), memories)


def test_rank_without_the_secret_reads_the_volume(job: Job) -> None:
    job.commit(5)
    job.replace(0)
    state, read = restore(job.checkpoint(5), job.next_group(5, secret=b"guessed"))
    assert same(state, make_state(5))
    assert read == RestoredBytes(memory=TOTAL_BYTES - of_rank(0), volume=of_rank(0))


def cut_off(connection: PeerConnection, segment: Segment, label: Label, before_chunk: object = None) -> None:
    raise PeerError("the node is lost")


def test_connection_that_is_cut_falls_back_to_the_volume(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.commit(5)
    job.replace(0)
    memories = job.next_group(5)
    monkeypatch.setattr(PeerConnection, "send_content", cut_off)
    state, read = restore(job.checkpoint(5), memories)
    assert same(state, make_state(5))
    assert read == RestoredBytes(memory=TOTAL_BYTES - of_rank(0), volume=of_rank(0))
    assert "rank-00000.safetensors is not read from the memory of node" in caplog.text


def test_second_holder_sends_what_the_first_one_cannot(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Node 1 has its own file in memory, and node 2 a copy, which is damaged."""
    job.commit(5)
    job.wipe_volume(5)
    fresh = Node()
    try:
        flip(job.copy_of(5, rank=1), job.label(5, rank=1).size - 5)
        (memory,) = fresh.begin(2, str(CheckpointName(5, 1)), job.nodes[2], job.nodes[1])
        state = {name: torch.full_like(tensor, torch.nan) for name, tensor in make_state().items()}
        fragments = fragments_of_rank(state, NODES, 1)
        assert Restore(job.checkpoint(5), fragments, memory).read([]) == RestoredBytes(peer=of_rank(1))
    finally:
        fresh.lose()
    assert "is not read from the memory of node" in caplog.text


def test_node_without_spare_memory_reads_the_volume(job: Job) -> None:
    job.commit(5)
    job.replace(0)
    memories = job.next_group(5)
    peers = memories[0].peers
    assert peers is not None
    memories[0].peers = type(peers)(peers.peers, peers.secret, free_bytes=lambda: machine_memory_bytes() // 10)
    state, read = restore(job.checkpoint(5), memories)
    assert same(state, make_state(5))
    assert read.volume == of_rank(0)


def test_each_file_is_logged_with_its_source(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.commit(5)
    job.replace(0)
    caplog.set_level("INFO")
    restore(job.checkpoint(5), job.next_group(5))
    assert "rank-00000.safetensors from memory of another node" in caplog.text
    assert "rank-00001.safetensors from memory of this node" in caplog.text
