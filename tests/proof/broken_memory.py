"""Workers that restore from memory with wrong bytes in it, and those that believe them; the checker has to find these.

The workers of a group without Ray find in memory what a control has put in a folder, under the labels of the commit
that they start from. Those of the whole product damage what is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from spotune_trainer.checkpoint.layout import Checkpoint, FileEntry, file_label, open_checkpoint
from spotune_trainer.checkpoint.memory.digests import SegmentDigests
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.memory.peer_connection import PeerConnection
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.worker import Worker
from tests.trainer.support.peers import nodes

_FLIPPED = bytes([0x80] * 4)
"""Changes sign and digits of a number, wherever it begins in these bytes."""


def held_files(directory: JobDirectory) -> Path:
    """Where a control puts the files that memory holds in place of those of the last commit."""
    return directory.root / "held"


class MemoryWorker(Worker):
    """Finds the files of `held_files` in the memory of its node, and verifies them as the product does."""

    at_peer = False
    trusts = False

    def restore(self) -> None:
        checkpoint = open_checkpoint(self.task.job_directory.checkpoints / str(self.task.restore))
        assert isinstance(checkpoint, Checkpoint)
        with ExitStack() as stack:
            self.checkpointing.memory = stack.enter_context(self._memory(checkpoint))
            if self.trusts:
                stack.enter_context(mock.patch.object(SegmentDigests, "is_intact", return_value=True))
                stack.enter_context(mock.patch.object(PeerConnection, "receive_content", receive_unverified))
            super().restore()
            self.checkpointing.check_memory()

    @contextmanager
    def _memory(self, checkpoint: Checkpoint) -> Iterator[RankMemory]:
        entries, name = checkpoint.manifest.files, str(checkpoint.name)
        labels = [file_label(checkpoint.name, entry) for entry in entries]
        with nodes(2) as (peer, own):
            node = peer if self.at_peer else own
            for memory, entry, label in zip(node.begin(0, ranks=len(entries)), entries, labels, strict=True):
                self._fill(memory, entry, label)
            peer.begin(self.task.generation, name, ranks=len(entries))
            yield own.begin(self.task.generation, name, peer, ranks=len(entries))[0]

    def _fill(self, memory: RankMemory, entry: FileEntry, label: Label) -> None:
        segment = memory.begin(entry.size)
        with segment.map() as mapped:
            mapped[LABEL_BYTES:] = (held_files(self.task.job_directory) / entry.name).read_bytes()
        memory.complete(segment, label)


class TrustingMemoryWorker(MemoryWorker):
    """Believes the label of a segment."""

    trusts = True


class PeerMemoryWorker(MemoryWorker):
    """Finds the files of `held_files` in the memory of another node."""

    at_peer = True


class TrustingPeerMemoryWorker(PeerMemoryWorker):
    """Believes that another node has what it says."""

    trusts = True


class DamagedMemoryTrusted(Worker):
    """In the product: some bits in its node's memory are others, and it does not verify them."""

    def restore(self) -> None:
        if self.memory is not None and self.task.restore is not None:
            _flip(self.memory.node)
        with mock.patch.object(SegmentDigests, "is_intact", return_value=True):
            super().restore()
            self.checkpointing.check_memory()


class DamagedCopyTrusted(Worker):
    """In the product: some bits that another node sends are others, and it does not verify them."""

    def restore(self) -> None:
        def receive_damaged(connection: PeerConnection, segment: Segment, label: Label) -> None:
            receive_unverified(connection, segment, label)
            _flip([segment])

        with mock.patch.object(PeerConnection, "receive_content", receive_damaged):
            super().restore()


def receive_unverified(connection: PeerConnection, segment: Segment, label: Label) -> None:
    """Receive a content without its checksum."""
    with segment.map() as mapped:
        mapped[LABEL_BYTES:] = connection.receive_bytes(label.size)


def flipped(content: bytes) -> bytes:
    """Some bits in the middle are others."""
    middle = len(content) // 2
    changed = bytes(a ^ b for a, b in zip(content[middle:], _FLIPPED, strict=False))
    return content[:middle] + changed + content[middle + len(_FLIPPED) :]


def _flip(segments: Sequence[Segment]) -> None:
    for segment in segments:
        with segment.map() as mapped:
            mapped[LABEL_BYTES:] = flipped(mapped[LABEL_BYTES:])
