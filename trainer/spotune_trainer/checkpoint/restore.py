"""Restore a rank's fragments: from its node's shared memory where that holds the checkpoint's files, else the volume.

The checkpoint is one that was committed on the volume; memory only saves reading it. A segment is used for a file if
its bytes have the checksum that the manifest records for that file. It is verified while it is read, like files are.
Whatever is wrong with a segment, the rank reads the file instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from spotune_trainer.checkpoint.fragment import Fragment
from spotune_trainer.checkpoint.layout import Checkpoint, file_label
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.reader import CheckpointReader, CorruptCheckpointError, is_intact, verify

logger = logging.getLogger("spotune.worker")


@dataclass(frozen=True)
class RestoredBytes:
    """How many bytes of its fragments a rank read from shared memory, and from the volume."""

    memory: int = 0
    volume: int = 0

    def __add__(self, other: RestoredBytes) -> RestoredBytes:
        return RestoredBytes(self.memory + other.memory, self.volume + other.volume)


class Restore:
    """The restore of one rank.

    Args:
        checkpoint: the checkpoint.
        fragments: the fragments to fill.
        memory: shared memory of the node; None without.

    Raises:
        CorruptCheckpointError: the files do not cover the fragments, or their headers cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, fragments: Sequence[Fragment], memory: RankMemory | None) -> None:
        self._checkpoint = checkpoint
        self._fragments = fragments
        self._entries = {entry.name: entry for entry in checkpoint.manifest.files}
        labels = [file_label(checkpoint.name, entry) for entry in checkpoint.manifest.files]
        self._segments = memory.holding(labels) if memory is not None else {}
        try:
            self._open()
        except CorruptCheckpointError as error:
            if not self._segments:
                raise
            self._distrust(list(self._segments), error.reason)
            self._open()

    @property
    def volume_files(self) -> set[str]:
        """The files that this rank reads from the volume. The ranks share the work of verifying those of all."""
        return self._bytes.keys() - self._segments.keys()

    def read(self, share: Iterable[str]) -> RestoredBytes:
        """Fill the fragments, and verify this rank's share of the files on the volume at the same time.

        Args:
            share: names of the files that this rank verifies.

        Raises:
            CorruptCheckpointError: a file is missing, truncated or changed.
        """
        used = {file: segment for file, segment in self._segments.items() if file in self._bytes}
        damaged: list[str] = []
        with ThreadPoolExecutor(1 + len(used), thread_name_prefix="verify") as verifier:
            verified = verifier.submit(verify, self._checkpoint, [self._entries[file] for file in share])
            intact = {file: verifier.submit(is_intact, used[file], self._entries[file]) for file in used}
            try:
                self._reader.restore(self._fragments)
            except CorruptCheckpointError:
                if all(each.result() for each in intact.values()):
                    raise
            damaged = [file for file, each in intact.items() if not each.result()]
            verified.result()
        if damaged:
            self._distrust(damaged, "its bytes do not have the checksum that the manifest records")
            self._open()
            verify(self._checkpoint, [self._entries[file] for file in damaged])
            self._reader.restore(self._fragments)
        return self._report()

    def _open(self) -> None:
        self._reader = CheckpointReader(self._checkpoint, self._segments)
        self._bytes = self._reader.bytes_by_file(self._fragments)

    def _distrust(self, files: Sequence[str], reason: str) -> None:
        """Read files from the volume which shared memory holds damaged."""
        logger.warning("shared memory of %s is damaged (%s): reading the volume", ", ".join(files), reason)
        self._segments = {file: segment for file, segment in self._segments.items() if file not in files}

    def _report(self) -> RestoredBytes:
        """Log the source of each file, and return the sums."""
        found = RestoredBytes()
        for file, count in self._bytes.items():
            in_memory = file in self._segments
            source = "memory of this node" if in_memory else "the volume"
            logger.info("restored %d bytes of %s/%s from %s", count, self._checkpoint.name, file, source)
            found += RestoredBytes(memory=count) if in_memory else RestoredBytes(volume=count)
        return found
