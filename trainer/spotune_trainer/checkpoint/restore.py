"""Restore a rank's fragments: each file from its node's memory, else from another node's, else from the volume.

The checkpoint is one that was committed on the volume; memory only saves reading it. A segment is used for a file if
its bytes have the checksum that the manifest records for that file. Files are verified while they are read. For a
segment, the checksum takes longer than the copy to a GPU. So training begins before it is known, and nothing is
committed until then (`check_memory`). What only another node has in memory, a rank copies from there into a segment of
its own, if it needs it. Whatever is wrong with a segment, or with another node, the file is read instead.
If the storage is a bucket, a rank downloads the files that it reads, unless its machine has them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from spotune.errors import InfrastructureError
from spotune_trainer.checkpoint.fragment import Fragment
from spotune_trainer.checkpoint.in_bucket.files import BucketFiles, DamagedFileError
from spotune_trainer.checkpoint.layout import Checkpoint, file_label
from spotune_trainer.checkpoint.memory.digests import SegmentDigests
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.memory.peer_connection import PeerError
from spotune_trainer.checkpoint.memory.peer_reader import PeerFile
from spotune_trainer.checkpoint.memory.segment import Segment
from spotune_trainer.checkpoint.reader import CheckpointReader, CorruptCheckpointError, fetch, verify

logger = logging.getLogger("spotune.worker")


class DamagedMemoryError(InfrastructureError):
    """Training began with bytes from shared memory that are not those of the checkpoint."""


@dataclass(frozen=True)
class RestoredBytes:
    """How many bytes of its fragments a rank read from its node's memory, from other nodes', and from the volume."""

    memory: int = 0
    peer: int = 0
    volume: int = 0

    def __add__(self, other: RestoredBytes) -> RestoredBytes:
        return RestoredBytes(self.memory + other.memory, self.peer + other.peer, self.volume + other.volume)


class Restore:
    """The restore of one rank.

    Args:
        checkpoint: the checkpoint.
        fragments: the fragments to fill.
        memory: shared memory of the node, and access to that of others; None without.

    Raises:
        CorruptCheckpointError: the files do not cover the fragments, or their headers cannot be read.
        BucketError: the storage is a bucket, and it cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, fragments: Sequence[Fragment], memory: RankMemory | None) -> None:
        self._checkpoint = checkpoint
        self._digests = memory.digests if memory is not None else SegmentDigests()
        self._fragments = fragments
        self._entries = {entry.name: entry for entry in checkpoint.manifest.files}
        labels = [file_label(checkpoint.name, entry) for entry in checkpoint.manifest.files]
        self._segments = memory.holding(labels) if memory is not None else {}
        self._peers = memory.peers if memory is not None else None
        self._in_bucket = BucketFiles.of(checkpoint.path)
        self._bucket_headers: dict[str, bytes] = {}
        self._at_peers: dict[str, list[PeerFile]] = {}
        self._copied: set[str] = set()
        self._unchecked: dict[str, Segment] = {}
        if self._peers is not None:
            self._at_peers = self._peers.find([label for label in labels if label.file not in self._segments])
        try:
            self._open()
            self._copy_from_peers()
        except CorruptCheckpointError as error:
            if not self._segments and not self._at_peers:
                raise
            self._distrust([*self._segments, *self._at_peers], error.reason)
            self._open()

    @property
    def volume_files(self) -> set[str]:
        """The files that this rank reads from the volume. The ranks share the work of verifying those of all.

        Empty if the storage is a bucket: a rank verifies what it downloads.
        """
        return set() if self._in_bucket is not None else self._bytes.keys() - self._segments.keys()

    def read(self, share: Iterable[str]) -> RestoredBytes:
        """Fill the fragments, and verify this rank's share of the files on the volume at the same time.

        What comes from shared memory is not verified when this returns; `check_memory` does that.

        Args:
            share: names of the files that this rank verifies.

        Raises:
            CorruptCheckpointError: a file is missing, truncated or changed.
        """
        self._unchecked = {  # what another node sent has been verified as it arrived
            file: segment
            for file, segment in self._segments.items()
            if file in self._bytes and file not in self._copied
        }
        from_volume = self.volume_files
        self._fetch()
        for segment in self._unchecked.values():
            self._digests.begin(segment)
        damaged: Collection[str] = ()
        with ThreadPoolExecutor(1, thread_name_prefix="verify") as verifier:
            verified = verifier.submit(verify, self._checkpoint, [self._entries[file] for file in share])
            try:
                self._reader.restore(self._fragments)
            except CorruptCheckpointError:
                if not (damaged := self._take_damaged()):
                    raise
            verified.result()
        if damaged:
            self._distrust(damaged, "its bytes do not have the checksum that the manifest records")
            self._open()
            self._fetch()
            verify(self._checkpoint, [self._entries[file] for file in self.volume_files - from_volume])
            self._reader.restore(self._fragments)
        return self._report()

    @property
    def is_computed(self) -> bool:
        """Whether `check_memory` returns at once."""
        return all(self._digests.is_computed(segment) for segment in self._unchecked.values())

    def check_memory(self) -> None:
        """Wait for the checksums of what came from shared memory. Nothing that was trained since may be kept before.

        Raises:
            DamagedMemoryError: the bytes are others than those that were committed. No later group uses them.
        """
        damaged = self._take_damaged()
        if damaged:
            for segment in damaged.values():
                segment.label = None
            raise DamagedMemoryError(
                f"shared memory of {', '.join(damaged)} is damaged: its bytes do not have the checksum that the "
                f"manifest of {self._checkpoint.name} records. The next worker group reads another copy"
            )

    def _take_damaged(self) -> dict[str, Segment]:
        """The segments that do not have the bytes that were committed, by file. All are checked afterwards."""
        unchecked, self._unchecked = self._unchecked, {}
        return {file: segment for file, segment in unchecked.items() if not self._is_intact(file, segment)}

    def _is_intact(self, file: str, segment: Segment) -> bool:
        entry = self._entries[file]
        return self._digests.is_intact(segment, entry.size, entry.xxh3)

    def _open(self) -> None:
        if self._in_bucket is not None:
            for file in self._entries.keys() - self._segments.keys() - self._bucket_headers.keys():
                self._bucket_headers[file] = self._header(self._in_bucket, file)
        headers = self._bucket_headers | {file: holders[0].header for file, holders in self._at_peers.items()}
        self._reader = CheckpointReader(self._checkpoint, self._segments, headers)
        self._bytes = self._reader.bytes_by_file(self._fragments)

    def _header(self, in_bucket: BucketFiles, file: str) -> bytes:
        """The header of a file in the bucket, or of the copy that another node has in memory."""
        if file in self._at_peers:
            return self._at_peers[file][0].header
        try:
            return in_bucket.header(self._entries[file])
        except DamagedFileError as error:
            raise CorruptCheckpointError(str(self._checkpoint.name), str(error)) from error

    def _fetch(self) -> None:
        """Download what this rank reads from the bucket, verified."""
        if self._in_bucket is not None:
            fetch(
                self._checkpoint, [self._entries[file] for file in sorted(self._bytes.keys() - self._segments.keys())]
            )

    def _copy_from_peers(self) -> None:
        """Copy the files that this rank needs, and that only other nodes have in memory, to segments of its own."""
        while files := [file for file in self._bytes if file in self._at_peers and file not in self._segments]:
            for file in files:
                segment = self._copy(file)
                if segment is None:
                    del self._at_peers[file]  # the volume is read
                else:
                    self._segments[file] = segment
                    self._copied.add(file)
            self._open()

    def _copy(self, file: str) -> Segment | None:
        """A copy of a file from the first node that sends it whole; None if none does."""
        assert self._peers is not None, "it has found the file"
        for held in self._at_peers[file]:
            try:
                return self._peers.read(held)
            except (PeerError, OSError) as error:
                logger.warning("%s is not read from the memory of node %s: %s", file, held.holder, error)
        return None

    def _distrust(self, files: Collection[str], reason: str) -> None:
        """Read files from the volume which shared memory holds damaged."""
        logger.warning("shared memory of %s is damaged (%s): reading the volume", ", ".join(files), reason)
        self._segments = {file: segment for file, segment in self._segments.items() if file not in files}
        self._at_peers = {file: holders for file, holders in self._at_peers.items() if file not in files}

    def _report(self) -> RestoredBytes:
        """Log the source of each file, and return the sums."""
        found = RestoredBytes()
        for file, count in self._bytes.items():
            if file not in self._segments:
                source, read = "the volume", RestoredBytes(volume=count)
            elif file in self._copied:
                source, read = "memory of another node", RestoredBytes(peer=count)
            else:
                source, read = "memory of this node", RestoredBytes(memory=count)
            logger.info("restored %d bytes of %s/%s from %s", count, self._checkpoint.name, file, source)
            found += read
        return found
