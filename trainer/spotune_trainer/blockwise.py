"""fp32 tensors kept in 8 bits an element (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").

Every block of 256 elements is divided by its largest magnitude, its scale; the quotients become the nearest of 256
levels in [-1, 1], which lie denser the nearer to zero (section 1.3, "dynamic quantization"), and a level's number is
the element's code.

What has been read is quantised to the same codes and scales again, bit for bit, since the element that a scale was
taken from has a level of its own: -1 or 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_ELEMENTS = 256
"""As in bitsandbytes' optimizers."""
_PIECE_ELEMENTS = 1 << 22
"""Quantised at once, whole blocks; that takes some 64 MiB meanwhile."""


_DECADES = 7
"""Levels reach down to some 10^-7."""
_LOWEST_UNSIGNED = 5.5e-8


def dynamic_levels(*, signed: bool, device: torch.device) -> Tensor:
    """The 256 levels in ascending order, fp32; the unsigned ones, for what is never negative, are twice as dense.

    In each decade that is nearer to 1 there are twice as many, evenly spaced; with them come 0 and 1, as in
    bitsandbytes. The lowest is another one. Of the signed ones it would be -0.993, which is no block's scale: here it
    is -1. Of the unsigned ones it would be 0, and Adam would divide by its epsilon alone where a second moment is much
    smaller than others of its block (Li et al. 2023, "Memory Efficient Optimizers with 4-bit States", section 4.1):
    here it is the middle of one decade more.
    """
    levels = [torch.tensor([0.0, 1.0])]
    for decade in range(_DECADES):
        bounds = torch.linspace(0.1, 1.0, (1 if signed else 2) * 2**decade + 1)
        middles = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES)
        levels += [middles, -middles] if signed else [middles]
    found = torch.cat(levels).sort().values
    found[0] = -1.0 if signed else _LOWEST_UNSIGNED
    return found.to(device)


class Blockwise:
    """A 1-D tensor of zeros, to be read and written as fp32.

    Args:
        elements: its length.
        levels: see `dynamic_levels`; on the device where the tensor lies.

    Attributes:
        codes: number of each element's level, uint8.
        scales: largest magnitude of each block, fp32.
        levels: as given.
    """

    def __init__(self, elements: int, levels: Tensor) -> None:
        zero = int(levels.abs().argmin())
        self.codes = torch.full((elements,), zero, dtype=torch.uint8, device=levels.device)
        self.scales = torch.zeros(-(-elements // BLOCK_ELEMENTS), dtype=torch.float32, device=levels.device)
        self.levels = levels

    def read(self, start: int, end: int) -> Tensor:
        """Elements [start, end) in fp32; that takes twice their memory meanwhile."""
        first, last = start // BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS)
        codes = self.codes[first * BLOCK_ELEMENTS : last * BLOCK_ELEMENTS]
        blocks = in_blocks(self.levels[codes.int()], BLOCK_ELEMENTS)
        blocks *= self.scales[first:last, None]
        return blocks.view(-1)[start - first * BLOCK_ELEMENTS : end - first * BLOCK_ELEMENTS]

    def write(self, start: int, values: Tensor) -> None:
        """Quantise values, on any device, into the elements from `start` on: whole blocks, but for the last one."""
        for piece in torch.split(values, _PIECE_ELEMENTS):
            first, end = start // BLOCK_ELEMENTS, start + piece.numel()
            nearest, scales = nearest_levels(in_blocks(piece.to(self.codes.device), BLOCK_ELEMENTS), self.levels)
            self.codes[start:end] = nearest.view(-1)[: piece.numel()]
            self.scales[first : first + scales.numel()] = scales
            start = end


@dataclass(frozen=True)
class Dequantised:
    """Elements [start, end) of a block-wise tensor, as an fp32 tensor that is there piece by piece, when asked for."""

    source: Blockwise
    start: int
    end: int

    @property
    def device(self) -> torch.device:
        """Where its pieces will be."""
        return self.source.codes.device

    def numel(self) -> int:
        """How many elements it has."""
        return self.end - self.start

    def split(self, split_size: int) -> Iterator[Tensor]:
        """The elements in order, at most so many at a time."""
        size = min(split_size, _PIECE_ELEMENTS)
        for start in range(self.start, self.end, size):
            yield self.source.read(start, min(start + size, self.end))


def in_blocks(elements: Tensor, size: int) -> Tensor:
    """A 1-D tensor as [blocks, size], the last block filled up with zeros."""
    return F.pad(elements, (0, -elements.numel() % size)).view(-1, size)


def nearest_levels(blocks: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Number of the level (ascending, in [-1, 1]) that is nearest to each element over its block's scale; the scales.

    Args:
        blocks: fp32 [blocks, elements of a block].
        levels: on the same device.

    Returns:
        int32 as `blocks`, and the largest magnitude of each block [blocks].
    """
    scales = blocks.abs().amax(dim=1)
    quotients = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    return torch.bucketize(quotients, (levels[:-1] + levels[1:]) / 2, out_int32=True), scales
