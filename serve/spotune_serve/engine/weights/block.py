"""All weights of a model in one block of device memory, filled through page-locked buffers.

One block instead of one allocation per tensor: a process that shares it hands out one handle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

_ALIGNMENT = 256
"""Bytes; the alignment of a CUDA allocation, so kernels see the same alignment as with a tensor of its own."""
_BUFFER_BYTES = 32 * 2**20
"""Size of each of the two page-locked buffers."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in the block.

    Attributes:
        name: of the parameter or buffer; for tied ones, the first name.
        dtype: its type.
        shape: its shape.
        offset: its first byte in the block.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, those that the model computes itself included; tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def layout_of(weights: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    """A place in the block for each tensor. It depends on names, types and shapes only."""
    entries: list[Entry] = []
    offset = 0
    for name, tensor in weights.items():
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), offset))
        offset += -(-entries[-1].size // _ALIGNMENT) * _ALIGNMENT
    return tuple(entries)


def bytes_of(layout: tuple[Entry, ...]) -> int:
    """Size of the block."""
    return -(-(layout[-1].offset + layout[-1].size) // _ALIGNMENT) * _ALIGNMENT if layout else 0


def fill(block: Tensor, weights: Mapping[str, Tensor], layout: tuple[Entry, ...]) -> None:
    """Copy the tensors to their places.

    Args:
        block: uint8 [bytes_of(layout)].
        weights: tensors on processors.
        layout: of these tensors.
    """
    sources = [(entry.offset, _bytes(weights[entry.name])) for entry in layout]
    if block.device.type != "cuda":
        for offset, source in sources:
            block[offset : offset + len(source)].copy_(source)
        return
    # The copy of one buffer to the device runs while the other one is filled.
    event: Any = torch.cuda.Event
    pairs = [(torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), event()) for _ in range(2)]
    for start, (buffer, copied) in zip(range(0, len(block), _BUFFER_BYTES), cycle(pairs), strict=False):
        end = min(start + _BUFFER_BYTES, len(block))
        copied.synchronize()
        for offset, source in sources:
            first, last = max(offset, start), min(offset + len(source), end)
            if first < last:
                buffer[first - start : last - start].copy_(source[first - offset : last - offset])
        block[start:end].copy_(buffer[: end - start], non_blocking=True)
        copied.record()
    torch.cuda.synchronize(block.device)


def attach(weights: Mapping[str, Tensor], block: Tensor, layout: tuple[Entry, ...]) -> None:
    """Make each tensor, in place, a part of the block. Tied tensors stay tied. Nothing is copied."""
    for entry in layout:
        part = block[entry.offset : entry.offset + entry.size].view(entry.dtype).view(entry.shape)
        weights[entry.name].data = part


def checksum(block: Tensor) -> int:
    """The sum of the block's 64-bit words, modulo 2**64. It is exact, so it does not depend on the device."""
    return int(block.view(torch.int64).sum())


def move_to(model: nn.Module, device: torch.device) -> None:
    """Copy all weights of a model to a device of its own."""
    weights = weights_of(model)
    layout = layout_of(weights)
    block = torch.empty(bytes_of(layout), dtype=torch.uint8, device=device)
    fill(block, weights, layout)
    attach(weights, block, layout)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
