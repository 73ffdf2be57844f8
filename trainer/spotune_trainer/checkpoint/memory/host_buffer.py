"""The host memory that a rank copies its fragments to for a commit: its own, or a segment of its node's shared memory.

A segment gets the same bytes as the rank's file: first the header, then the elements of all tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from spotune_trainer.checkpoint.layout import CheckpointName, FileEntry
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment
from spotune_trainer.checkpoint.writer import file_header

logger = logging.getLogger("spotune.worker")

_ELEMENT_BYTES = 4
_REFUSED = (OSError, RuntimeError)
"""Errors of the kernel, and of CUDA, if memory cannot be allocated, mapped or page-locked."""

Sizes = Sequence[tuple[str, int]]
"""Name and number of elements of every tensor of a commit, in the order of the file."""


class HostBuffer(Protocol):
    """Memory for one commit after another."""

    def prepare(self, sizes: Sizes) -> None:
        """Allocate the memory of the next commit in advance."""

    def begin(self, sizes: Sizes) -> Tensor:
        """Memory for all elements of a commit that begins now: `[elements]`, fp32, in host memory."""

    def complete(self, name: CheckpointName, entry: FileEntry) -> None:
        """The commit that began last has been copied, and written to this file."""


class PrivateBuffer:
    """Memory of this process, allocated once.

    Args:
        on_allocated: called with new memory.
    """

    def __init__(self, on_allocated: Callable[[Tensor], None]) -> None:
        self._on_allocated = on_allocated
        self._buffer = torch.empty(0, dtype=torch.float32)

    def prepare(self, sizes: Sizes) -> None:
        """See `HostBuffer`."""
        elements = _elements(sizes)
        if self._buffer.numel() != elements:
            self._buffer = torch.empty(elements, dtype=torch.float32)
            self._on_allocated(self._buffer)

    def begin(self, sizes: Sizes) -> Tensor:
        """See `HostBuffer`."""
        self.prepare(sizes)
        return self._buffer

    def complete(self, name: CheckpointName, entry: FileEntry) -> None:
        """Nothing to do: the memory ends with this process."""


class SharedBuffer:
    """Segments of shared memory, which keep the last complete commit for the next worker group.

    Where there is not enough memory for a segment, the commits use memory of this process.

    Args:
        memory: the segments of this rank.
        on_allocated: called with new memory.
    """

    def __init__(self, memory: RankMemory, on_allocated: Callable[[Tensor], None]) -> None:
        self._memory = memory
        self._on_allocated = on_allocated
        self._mapped: dict[Segment, Tensor] = {}
        self._current: Segment | None = None
        self._private: PrivateBuffer | None = None

    def prepare(self, sizes: Sizes) -> None:
        """See `HostBuffer`."""
        segment = self._memory.prepare(_content_bytes(sizes)) if self._private is None else None
        if segment is not None:
            with suppress(*_REFUSED):  # `begin` tries again
                self._map(segment, sizes)

    def begin(self, sizes: Sizes) -> Tensor:
        """See `HostBuffer`."""
        if self._private is None:
            try:
                self._current = self._memory.begin(_content_bytes(sizes))
                mapped = self._map(self._current, sizes)
            except _REFUSED as error:
                logger.warning(
                    "the snapshots of commits are not kept in shared memory: %.1f GB cannot be allocated (%s). "
                    "Worker groups that start after a loss read the volume",
                    _content_bytes(sizes) / 1e9,
                    error,
                )
                self._current = None
                self._mapped.clear()
                self._memory.give_up()
                self._private = PrivateBuffer(self._on_allocated)
            else:
                header = file_header(sizes)
                mapped[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
                return mapped[len(header) :].view(torch.float32)
        return self._private.begin(sizes)

    def complete(self, name: CheckpointName, entry: FileEntry) -> None:
        """See `HostBuffer`."""
        if self._current is not None:
            self._memory.complete(self._current, Label(name, entry))

    def _map(self, segment: Segment, sizes: Sizes) -> Tensor:
        """The content of a segment as bytes: `[content_bytes]`, uint8."""
        found = self._mapped.get(segment)
        if found is None or found.numel() != _content_bytes(sizes):
            found = torch.frombuffer(segment.map(), dtype=torch.uint8, offset=LABEL_BYTES)
            self._on_allocated(found)
            self._mapped[segment] = found
        return found


def _elements(sizes: Sizes) -> int:
    return sum(elements for _, elements in sizes)


def _content_bytes(sizes: Sizes) -> int:
    return len(file_header(sizes)) + _ELEMENT_BYTES * _elements(sizes)
