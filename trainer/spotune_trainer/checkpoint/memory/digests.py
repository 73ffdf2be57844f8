"""Checksums (XXH3-64) of files and of segments of shared memory.

Files are read in blocks: a volume that fails then raises an error instead of SIGBUS. Segments are mapped and hashed in
one call: nothing is copied, and the thread does not wait for Python's lock between blocks while other threads hold it.
"""

from __future__ import annotations

import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO

import xxhash

from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Segment

_BLOCK_BYTES = 64 << 20
"""Large, since a thread waits for Python's lock between two blocks."""


def checksum(file: FileIO) -> str:
    """The checksum of a file from its position to its end, in hex.

    Raises:
        OSError: the file cannot be read.
    """
    digest, block = xxhash.xxh3_64(), memoryview(bytearray(_BLOCK_BYTES))
    while count := file.readinto(block):
        digest.update(block[:count])
    return digest.hexdigest()


class SegmentDigests:
    """Computes checksums of segments in threads of its own. Each serves one comparison: contents may change after."""

    def __init__(self) -> None:
        self._digests: dict[Segment, Future[str]] = {}

    def begin(self, segment: Segment) -> None:
        """Start to compute the checksum for the next comparison, unless it has been started."""
        if segment not in self._digests:
            thread = ThreadPoolExecutor(1, thread_name_prefix="verify")
            self._digests[segment] = thread.submit(_digest_of_segment, segment)
            thread.shutdown(wait=False)  # it ends with the checksum

    def is_computed(self, segment: Segment) -> bool:
        """Whether the checksum for the next comparison is known."""
        return segment in self._digests and self._digests[segment].done()

    def is_intact(self, segment: Segment, size: int, xxh3: str) -> bool:
        """Whether the content has this size and this checksum."""
        if segment.content_bytes != size:
            return False
        self.begin(segment)
        return self._digests.pop(segment).result() == xxh3


def _digest_of_segment(segment: Segment) -> str:
    with (
        segment.open() as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        memoryview(mapped) as whole,
        whole[LABEL_BYTES:] as content,
    ):
        return xxhash.xxh3_64(content).hexdigest()
