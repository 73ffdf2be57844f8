"""A segment of shared memory: the bytes of one rank's file of a checkpoint, which outlive the rank's process.

A segment is an anonymous file in memory (memfd_create(2)). It has no name, so nothing is left behind: the kernel frees
it as soon as no process has it open, however these ended. It is not in /dev/shm, which a container limits to 64 MiB by
default, but counts as memory of the container all the same.

    byte 0      label: which file of which checkpoint follows, as JSON; zeros while the content is incomplete
    byte 4096   content: the bytes of that file

Whoever reads a segment compares the content with the checksum in the checkpoint's manifest. So only bytes that were
committed are ever restored, whatever a killed process left in the segment.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass
from io import FileIO
from multiprocessing import reduction
from typing import Any

LABEL_BYTES = 4096
"""Size of the label, which the content follows. A page, so that mapped content has the alignment of the file."""
MEMORY_FILE = "spotune-snapshot"
"""Name of the segments in /proc/PID/fd, where they appear as `/memfd:spotune-snapshot (deleted)`."""


@dataclass(frozen=True)
class Label:
    """What a segment contains: the bytes of a file of a checkpoint.

    Attributes:
        checkpoint: name of the checkpoint.
        file: name of the file.
        size: of the file, in bytes.
        xxh3: checksum of its content, in hex.
    """

    checkpoint: str
    file: str
    size: int
    xxh3: str


class Segment:
    """A segment, shared by all processes that it was sent to as an argument of `multiprocessing`.

    Args:
        descriptor: of the file in memory; the segment closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls) -> Segment:
        """A new segment, which takes no memory yet.

        Raises:
            OSError: the kernel offers no files in memory.
        """
        return cls(os.memfd_create(MEMORY_FILE, os.MFD_CLOEXEC))

    @property
    def allocated_bytes(self) -> int:
        """Memory that it takes now."""
        return os.fstat(self._descriptor).st_blocks * 512

    @property
    def content_bytes(self) -> int:
        """Size of the content; 0 if it is free."""
        return max(0, os.fstat(self._descriptor).st_size - LABEL_BYTES)

    @property
    def label(self) -> Label | None:
        """What it contains; None if it is free or its content is incomplete."""
        text = os.pread(self._descriptor, LABEL_BYTES, 0).rstrip(b"\0")
        if not text:
            return None
        try:
            return Label(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @label.setter
    def label(self, label: Label | None) -> None:
        value = b"" if label is None else json.dumps(asdict(label)).encode()
        assert len(value) <= LABEL_BYTES, "names of checkpoints and files are short"
        if self.content_bytes:
            os.pwrite(self._descriptor, value.ljust(LABEL_BYTES, b"\0"), 0)

    def resize(self, content_bytes: int) -> None:
        """Allocate memory for this many bytes. A content of the same size stays, any other is lost.

        No process may have mapped a content of another size: the kernel would kill it at its next access.

        Raises:
            OSError: there is not enough memory; the segment is free then.
        """
        if self.content_bytes == content_bytes:
            return
        self.free()
        try:
            os.posix_fallocate(self._descriptor, 0, LABEL_BYTES + content_bytes)
        except OSError:
            self.free()
            raise

    def map(self) -> mmap.mmap:
        """The whole segment, label included, for reading and writing."""
        return mmap.mmap(self._descriptor, LABEL_BYTES + self.content_bytes)

    def open(self) -> FileIO:
        """Open it for reading only."""
        return FileIO(f"/proc/self/fd/{self._descriptor}", "rb")

    def free(self) -> None:
        """Give its memory back."""
        os.ftruncate(self._descriptor, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (reduction.DupFd(self._descriptor),)

    def __del__(self) -> None:
        os.close(self._descriptor)


def _receive(sent: Any) -> Segment:
    descriptor = sent.detach()
    os.set_inheritable(descriptor, False)
    return Segment(descriptor)
