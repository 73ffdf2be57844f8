"""fp32 tensors kept in 8 bits an element (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").

Every block of 256 elements is divided by its largest magnitude, its scale; the quotients become the nearest of 256
levels in [-1, 1], which lie denser the nearer to zero (section 1.3, "dynamic quantization"), and a level's number is
the element's code.

What has been read is quantised to the same codes and scales again, bit for bit, since the element that a scale was
taken from has a level of its own: -1 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_ELEMENTS = 256
"""As in bitsandbytes' optimizers."""
PIECE_ELEMENTS = 1 << 22
"""Quantised at once, whole blocks; that takes some 64 MiB meanwhile."""


_DECADES = 7
"""Levels reach down to some 10^-7."""
_LOWEST_UNSIGNED = 5.5e-8


class Levels(NamedTuple):
    """What elements become, and how to find the nearest one without a search.

    Attributes:
        values: the levels in ascending order, fp32 [256].
        bounds: where the next level is nearer; after the last level infinity, fp32 [256].
        guesses: by the upper 16 bits of an fp32 number, the level that is nearest to the lowest number of these bits;
            a higher one of them belongs to that level or to the next, uint8 [65536].
    """

    values: Tensor
    bounds: Tensor
    guesses: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Levels:
        """What follows from the levels alone."""
        bounds = F.pad(midpoints(values), (0, 1), value=math.inf)
        upper = torch.arange(1 << 16, device=values.device)
        lowest = torch.where(upper < 1 << 15, upper << 16, (upper << 16) + 0xFFFF - (1 << 32))
        numbers = lowest.to(torch.int32).view(torch.float32).nan_to_num()
        return cls(values, bounds, torch.bucketize(numbers, bounds[:-1]).to(torch.uint8))


def dynamic_levels(*, signed: bool, device: torch.device) -> Levels:
    """The 256 levels; the unsigned ones, for what is never negative, are twice as dense.

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
    return Levels.of(found.to(device))


class Blocks(NamedTuple):
    """Some blocks of a block-wise tensor: what `Blockwise` says of it, as tensors alone."""

    codes: Tensor
    scales: Tensor
    levels: Levels


class Blockwise:
    """A 1-D tensor of zeros, to be read and written as fp32.

    Args:
        elements: its length.
        levels: see `dynamic_levels`; on the device where the tensor lies.

    Attributes:
        elements: as given.
        codes: number of each element's level, uint8 [blocks, elements of a block]; the last block may be longer than
            what is left for it, and has anything there.
        scales: largest magnitude of each block, fp32 [blocks].
        levels: as given.
    """

    def __init__(self, elements: int, levels: Levels) -> None:
        self.elements = elements
        blocks, device = -(-elements // BLOCK_ELEMENTS), levels.values.device
        zero = int(levels.values.abs().argmin())
        self.codes = torch.full((blocks, BLOCK_ELEMENTS), zero, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(blocks, dtype=torch.float32, device=device)
        self.levels = levels

    def read(self, start: int, end: int) -> Tensor:
        """Elements [start, end) in fp32; that takes twice their memory meanwhile."""
        skipped = start % BLOCK_ELEMENTS
        return dequantise(self.blocks(start - skipped, end)).view(-1)[skipped : skipped + end - start]

    def blocks(self, start: int, end: int) -> Blocks:
        """The blocks of elements [start, end), of which the first begins a block; what they hold is this tensor's."""
        within = slice(start // BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS))
        return Blocks(self.codes[within], self.scales[within], self.levels)

    def write(self, start: int, values: Tensor) -> None:
        """Quantise values, on any device, into the elements from `start` on: whole blocks, but for the last one."""
        first = start // BLOCK_ELEMENTS
        for piece in torch.split(values, PIECE_ELEMENTS):
            blocks = in_blocks(piece.to(self.codes.device), BLOCK_ELEMENTS)
            last = first + len(blocks)
            self.codes[first:last], self.scales[first:last] = nearest_levels(blocks, self.levels)
            first = last


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
        size = min(split_size, PIECE_ELEMENTS)
        for start in range(self.start, self.end, size):
            yield self.source.read(start, min(start + size, self.end))


def in_blocks(elements: Tensor, size: int) -> Tensor:
    """A 1-D tensor as [blocks, size], the last block filled up with zeros."""
    return F.pad(elements, (0, -elements.numel() % size)).view(-1, size)


def midpoints(levels: Tensor) -> Tensor:
    """Where the nearest level is another one."""
    return (levels[:-1] + levels[1:]) / 2


def scaled(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 blocks [blocks, elements of a block], each over its scale, and the scales [blocks]: largest magnitudes."""
    scales = blocks.abs().amax(dim=1)
    return blocks / torch.where(scales == 0, 1.0, scales)[:, None], scales


def nearest_levels(blocks: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """Of fp32 blocks the number of the level that is nearest to each element over its block's scale; the scales.

    Returns:
        uint8 [blocks, elements of a block] and fp32 [blocks].
    """
    quotients, scales = scaled(blocks)
    guesses = levels.guesses[quotients.view(torch.int32) >> 16 & 0xFFFF].int()
    return (guesses + (quotients > levels.bounds[guesses])).to(torch.uint8), scales


def dequantise(blocks: Blocks) -> Tensor:
    """The elements, fp32 [blocks, elements of a block]."""
    return blocks.levels.values[blocks.codes.int()] * blocks.scales[:, None]
