"""Block-wise dynamic quantization of fp32 tensors to 8 bits an element.

The method is that of "8-bit Optimizers via Block-wise Quantization" (Dettmers et al. 2022, arXiv:2110.02861):

1. *Quantization map* (section 1.2): a code from 0 to 255 stands for a number in [-1, 1], namely
   `QuantizationMap.values[code]`. In *dynamic* quantization (section 1.3) these numbers are denser near zero.
2. *Block absmax* (section 2.1): a tensor is cut into blocks of 256 elements; each is normalized by its largest
   magnitude, its absmax. An outlier then costs precision in its own block alone.
3. *Nearest code* (section 1.2): an element's code is that of the number nearest to the normalized element.

Dequantization is `values[code] * absmax`.

Quantizing what was dequantized gives the same numbers again, bit for bit, so a run resumed from a checkpoint in fp32
continues exactly. That holds because -1 or 1, the normalized element of largest magnitude, is in the map: the absmax
does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_ELEMENTS = 256
"""Block size of bitsandbytes' optimizers; the paper has 2048."""
CHUNK_ELEMENTS = 1 << 22
"""Elements that are quantized at once, whole blocks. It takes about 64 MiB of temporary memory."""

_DECADES = 7
"""Powers of ten that the map covers: its numbers go down to about 10^-7."""
_LOWEST_UNSIGNED = 5.5e-8


class QuantizationMap(NamedTuple):
    """The numbers that codes stand for, and tables to find the nearest one without a search; see `quantize_blocks`.

    Attributes:
        values: number of each code in ascending order, fp32 [256].
        midpoints: `midpoints[code]` lies halfway between the numbers of `code` and `code + 1`; the last one is
            infinity. fp32 [256].
        lowest_codes: for each value of the upper 16 bits of an fp32 number, the code nearest to the *lowest* number
            with these bits. uint8 [65536].
    """

    values: Tensor
    midpoints: Tensor
    lowest_codes: Tensor

    @classmethod
    def from_values(cls, values: Tensor) -> QuantizationMap:
        """Compute the tables for numbers in ascending order."""
        midpoints = midpoints_between(values)
        upper_bits = torch.arange(1 << 16, device=values.device)
        # An fp32 number is sign (1 bit), exponent (8), mantissa (23). With the upper 16 bits fixed, its magnitude grows
        # with the lower 16. The lowest number therefore has the lower bits 0x0000 if it is positive. If it is negative
        # (sign bit set: upper_bits >= 2^15) it has 0xFFFF, and as a signed int32 the pattern is 2^32 less.
        is_positive = upper_bits < 1 << 15
        patterns = torch.where(is_positive, upper_bits << 16, (upper_bits << 16) + 0xFFFF - (1 << 32))
        lowest = patterns.to(torch.int32).view(torch.float32).nan_to_num()
        lowest_codes = torch.bucketize(lowest, midpoints).to(torch.uint8)
        return cls(values, F.pad(midpoints, (0, 1), value=math.inf), lowest_codes)


def dynamic_quantization_map(*, signed: bool, device: torch.device) -> QuantizationMap:
    """The map of 256 numbers; without signs, for tensors that are never negative, it is twice as dense.

    Each decade has twice as many numbers as the next lower one, evenly spaced: the middles of equal intervals. 0 and 1
    are added, as in bitsandbytes. The lowest number differs from bitsandbytes:

    - Signed: -1 instead of -0.993, because the element of largest magnitude may be negative, and its normalized value
      must be in the map.
    - Unsigned: the middle of one more decade instead of 0. A second moment that is small beside others of its block
      would become 0, and Adam would divide by its epsilon alone (Li et al. 2023, "Memory Efficient Optimizers with
      4-bit States", section 4.1).
    """
    parts = [torch.tensor([0.0, 1.0])]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, (1 if signed else 2) * 2**decade + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES)
        parts += [middles, -middles] if signed else [middles]
    values = torch.cat(parts).sort().values
    values[0] = -1.0 if signed else _LOWEST_UNSIGNED
    return QuantizationMap.from_values(values.to(device))


class QuantizedBlocks(NamedTuple):
    """Some blocks of a `BlockwiseTensor`: a tuple of tensors, which torch.compile accepts as an argument.

    Attributes:
        codes: uint8 [blocks, BLOCK_ELEMENTS].
        absmax: fp32 [blocks].
        quantization_map: of all of them.
    """

    codes: Tensor
    absmax: Tensor
    quantization_map: QuantizationMap

    def cut(self, start: int, stop: int) -> QuantizedBlocks:
        """Blocks [start, stop) of these, as views."""
        return QuantizedBlocks(self.codes[start:stop], self.absmax[start:stop], self.quantization_map)


class BlockwiseTensor:
    """A 1-D tensor kept in 8-bit blocks, and read and written in fp32; zeros at first.

    Args:
        elements: its length.
        quantization_map: see `dynamic_quantization_map`; the tensor is created on the map's device.
        empty: allocates a number of elements of a type there, in one dimension. None: PyTorch does.

    Attributes:
        elements: its length.
        codes: uint8 [blocks, BLOCK_ELEMENTS]; behind the last element they are arbitrary.
        absmax: largest magnitude of each block, fp32 [blocks].
        quantization_map: as given.
    """

    def __init__(
        self,
        elements: int,
        quantization_map: QuantizationMap,
        empty: Callable[[int, torch.dtype], Tensor] | None = None,
    ) -> None:
        self.elements = elements
        blocks, device = math.ceil(elements / BLOCK_ELEMENTS), quantization_map.values.device
        empty = empty or (lambda length, dtype: torch.empty(length, dtype=dtype, device=device))
        code_nearest_zero = int(quantization_map.values.abs().argmin())
        self.codes = empty(blocks * BLOCK_ELEMENTS, torch.uint8).fill_(code_nearest_zero).view(-1, BLOCK_ELEMENTS)
        self.absmax = empty(blocks, torch.float32).zero_()
        self.quantization_map = quantization_map

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in fp32. It takes as much temporary memory again."""
        skipped = start % BLOCK_ELEMENTS
        return dequantize(self.blocks(start - skipped, stop)).view(-1)[skipped : skipped + stop - start]

    def blocks(self, start: int, stop: int) -> QuantizedBlocks:
        """The blocks of elements [start, stop) as views; `start` must be the first element of a block."""
        within = slice(start // BLOCK_ELEMENTS, math.ceil(stop / BLOCK_ELEMENTS))
        return QuantizedBlocks(self.codes[within], self.absmax[within], self.quantization_map)

    def write(self, start: int, values: Tensor) -> None:
        """Quantize values, from any device, into the elements from `start` on.

        They must be whole blocks; only the tensor's last block may be shorter.
        """
        first = start // BLOCK_ELEMENTS
        for chunk in torch.split(values, CHUNK_ELEMENTS):
            blocks = split_into_blocks(chunk.to(self.codes.device), BLOCK_ELEMENTS)
            stop = first + len(blocks)
            self.codes[first:stop], self.absmax[first:stop] = quantize_blocks(blocks, self.quantization_map)
            first = stop


@dataclass(frozen=True)
class DequantizedView:
    """Elements [start, stop) of a `BlockwiseTensor`, dequantized chunk by chunk while they are read.

    It has the part of a tensor's interface that a checkpoint's snapshot needs.
    """

    source: BlockwiseTensor
    start: int
    stop: int

    @property
    def device(self) -> torch.device:
        """Device of the chunks."""
        return self.source.codes.device

    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def split(self, split_size: int) -> Iterator[Tensor]:
        """The elements in order, in fp32 chunks of at most `split_size`."""
        size = min(split_size, CHUNK_ELEMENTS)
        for start in range(self.start, self.stop, size):
            yield self.source.read(start, min(start + size, self.stop))


def split_into_blocks(elements: Tensor, block_elements: int) -> Tensor:
    """A 1-D tensor as [blocks, block_elements], the last block padded with zeros."""
    return F.pad(elements, (0, -elements.numel() % block_elements)).view(-1, block_elements)


def midpoints_between(values: Tensor) -> Tensor:
    """Halfway points between neighbours of a quantization map, [n - 1]: where the nearest one changes."""
    return (values[:-1] + values[1:]) / 2


def normalize_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Each block divided by its absmax, and the absmax of each block.

    Args:
        blocks: fp32 [blocks, block_elements].

    Returns:
        fp32 [blocks, block_elements] in [-1, 1], and fp32 [blocks]; a block of zeros remains zero.
    """
    absmax = blocks.abs().amax(dim=1)
    return blocks / torch.where(absmax == 0, 1.0, absmax)[:, None], absmax


def quantize_blocks(blocks: Tensor, quantization_map: QuantizationMap) -> tuple[Tensor, Tensor]:
    """Codes and absmax of fp32 blocks: the nearest number of the map for each normalized element.

    A search in 255 midpoints takes eight dependent reads for an element. Two reads are enough:

    1. Take the upper 16 bits of the normalized element: `lowest_codes` has the code nearest to the lowest number with
       these bits, so the element's own code is this one or a higher one.
    2. The numbers with these bits are so close (they differ by less than 1 part in 128) that at most one midpoint lies
       between them. So it is this code or the next: the next if the element is above the midpoint between the two.

    Args:
        blocks: fp32 [blocks, BLOCK_ELEMENTS].
        quantization_map: of the tensor that the blocks belong to.

    Returns:
        Codes, uint8 [blocks, BLOCK_ELEMENTS], and absmax, fp32 [blocks].
    """
    normalized, absmax = normalize_blocks(blocks)
    upper_bits = normalized.view(torch.int32) >> 16 & 0xFFFF  # the mask removes the sign bits that >> shifts in
    codes = quantization_map.lowest_codes[upper_bits].int()
    codes = codes + (normalized > quantization_map.midpoints[codes])
    return codes.to(torch.uint8), absmax


def dequantize(blocks: QuantizedBlocks) -> Tensor:
    """The elements of the blocks, fp32 [blocks, BLOCK_ELEMENTS]."""
    return blocks.quantization_map.values[blocks.codes.int()] * blocks.absmax[:, None]
