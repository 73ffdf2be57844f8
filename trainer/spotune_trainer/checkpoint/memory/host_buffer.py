"""The host memory that a rank copies its fragments to for a commit: its own, or a segment of its node's shared memory.

A segment gets the same bytes as the rank's file: first the header, then the elements of all tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment

logger = logging.getLogger("spotune.worker")

_ELEMENT_BYTES = 4
_REFUSED = (OSError, RuntimeError)
"""Errors of the kernel, and of CUDA, if memory cannot be allocated, mapped or page-locked."""


@dataclass(frozen=True)
class Content:
    """What a commit needs memory for: the header of the rank's file, and the number of fp32 elements after it."""

    header: bytes
    elements: int

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + _ELEMENT_BYTES * self.elements


class HostBuffer(Protocol):
    """Memory for one commit after another."""

    def prepare(self, content: Content) -> None:
        """Allocate the memory of the next commit in advance."""

    def begin(self, content: Content) -> Tensor:
        """Memory for all elements of a commit that begins now: `[elements]`, fp32, in host memory."""

    def complete(self, label: Label) -> None:
        """The commit that began last has been copied, and written to this file."""


class PrivateBuffer:
    """Memory of this process, allocated once.

    Args:
        on_allocated: called with new memory.
    """

    def __init__(self, on_allocated: Callable[[Tensor], None]) -> None:
        self._on_allocated = on_allocated
        self._buffer = torch.empty(0, dtype=torch.float32)

    def prepare(self, content: Content) -> None:
        """See `HostBuffer`."""
        elements = content.elements
        if self._buffer.numel() != elements:
            self._buffer = torch.empty(elements, dtype=torch.float32)
            self._on_allocated(self._buffer)

    def begin(self, content: Content) -> Tensor:
        """See `HostBuffer`."""
        self.prepare(content)
        return self._buffer

    def complete(self, label: Label) -> None:
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

    def prepare(self, content: Content) -> None:
        """See `HostBuffer`."""
        segment = self._memory.prepare(content.file_bytes) if self._private is None else None
        if segment is not None:
            with suppress(*_REFUSED):  # `begin` tries again
                self._map(segment, content)

    def begin(self, content: Content) -> Tensor:
        """See `HostBuffer`."""
        if self._private is None:
            try:
                self._current = self._memory.begin(content.file_bytes)
                mapped = self._map(self._current, content)
            except _REFUSED as error:
                logger.warning(
                    "the snapshots of commits are not kept in shared memory: %.1f GB cannot be allocated (%s). "
                    "Worker groups that start after a loss read the volume",
                    content.file_bytes / 1e9,
                    error,
                )
                self._current = None
                self._mapped.clear()
                self._memory.give_up()
                self._private = PrivateBuffer(self._on_allocated)
            else:
                start = len(content.header)
                mapped[:start].copy_(torch.frombuffer(bytearray(content.header), dtype=torch.uint8))
                return mapped[start:].view(torch.float32)
        return self._private.begin(content)

    def complete(self, label: Label) -> None:
        """See `HostBuffer`."""
        if self._current is not None:
            self._memory.complete(self._current, label)

    def _map(self, segment: Segment, content: Content) -> Tensor:
        """The content of a segment as bytes: `[file_bytes]`, uint8."""
        found = self._mapped.get(segment)
        if found is None or found.numel() != content.file_bytes:
            found = torch.frombuffer(segment.map(), dtype=torch.uint8, offset=LABEL_BYTES)
            self._on_allocated(found)
            self._mapped[segment] = found
        return found
