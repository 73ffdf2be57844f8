"""Block-wise quantization: nearest codes, error bounds, and exact round trips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from spotune_trainer.models.quantization.blockwise import (
    BLOCK_ELEMENTS,
    BlockwiseTensor,
    dynamic_quantization_map,
    quantize_blocks,
)

CPU = torch.device("cpu")
MAPS = {signed: dynamic_quantization_map(signed=signed, device=CPU) for signed in (True, False)}
LARGEST_GAP = {signed: float(quantization_map.values.diff().max()) for signed, quantization_map in MAPS.items()}

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
blocks = st.lists(st.tuples(st.integers(1, BLOCK_ELEMENTS), st.lists(floats, min_size=1, max_size=8)), min_size=1)


def made_of(rows: list[tuple[int, list[float]]], signed: bool) -> Tensor:
    """Whole blocks and a last one of the given length; each repeats its few values."""
    parts = [torch.tensor(values).repeat(BLOCK_ELEMENTS)[:BLOCK_ELEMENTS] for _, values in rows]
    parts[-1] = parts[-1][: rows[-1][0]]
    return torch.cat(parts) if signed else torch.cat(parts).abs()


def quantized(values: Tensor, signed: bool) -> BlockwiseTensor:
    found = BlockwiseTensor(values.numel(), MAPS[signed])
    found.write(0, values)
    return found


@pytest.mark.parametrize("signed", [True, False])
@given(rows=blocks)
@example(rows=[(256, [-1.0, 0.5, 0.001])])  # the absmax is that of a negative element
@example(rows=[(256, [0.0]), (7, [-0.0, 1e-30])])
@example(rows=[(9, [3e-39, -2e-45, 1e-42])])  # subnormal: codes may differ, values may not
def test_quantizing_what_was_dequantized_is_bit_for_bit_stable(
    rows: list[tuple[int, list[float]]], signed: bool
) -> None:
    once = quantized(made_of(rows, signed), signed)
    read = once.read(0, once.elements)
    again = quantized(read, signed)
    assert torch.equal(again.read(0, read.numel()), read)
    assert torch.equal(again.absmax, once.absmax)
    if bool((once.absmax[once.absmax > 0] > 1e-30).all()):
        assert torch.equal(again.codes, once.codes)


@pytest.mark.parametrize("signed", [True, False])
@given(rows=blocks)
def test_the_error_is_at_most_half_a_quantization_step(rows: list[tuple[int, list[float]]], signed: bool) -> None:
    values = made_of(rows, signed)
    found = quantized(values, signed)
    scales = found.absmax.repeat_interleave(BLOCK_ELEMENTS)[: values.numel()]
    error = (found.read(0, values.numel()) - values).abs()
    assert bool((error <= scales * (LARGEST_GAP[signed] / 2 + 1e-6) + 1e-44).all())


@given(codes=st.lists(st.integers(0, 255), min_size=2, max_size=BLOCK_ELEMENTS), scale=st.floats(1e-30, 1e30))
def test_codes_that_a_compiled_kernel_chose_survive_a_round_trip(codes: list[int], scale: float) -> None:
    """The codes need not be the nearest ones, but one element of the block must have the absmax."""
    found = BlockwiseTensor(len(codes), MAPS[True])
    found.codes[0, : len(codes)] = torch.tensor([*codes[:-1], 255])
    found.absmax.fill_(scale)
    again = quantized(found.read(0, len(codes)), signed=True)
    assert torch.equal(again.codes[0, : len(codes)], found.codes[0, : len(codes)])
    assert torch.equal(again.absmax, found.absmax)


def test_any_range_reads_the_same_as_the_whole_tensor() -> None:
    values = torch.randn(3 * BLOCK_ELEMENTS + 11, generator=torch.Generator().manual_seed(0))
    found = quantized(values, signed=True)
    whole = found.read(0, values.numel())
    for start, end in ((0, 1), (255, 257), (300, 700), (768, 779), (5, 5)):
        assert torch.equal(found.read(start, end), whole[start:end])


def test_writing_block_by_block_equals_writing_at_once() -> None:
    values = torch.randn(5 * BLOCK_ELEMENTS + 3, generator=torch.Generator().manual_seed(0))
    found = BlockwiseTensor(values.numel(), MAPS[True])
    for start in range(0, values.numel(), 2 * BLOCK_ELEMENTS):
        found.write(start, values[start : start + 2 * BLOCK_ELEMENTS])
    expected = quantized(values, signed=True)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.absmax, expected.absmax)


@pytest.mark.parametrize("signed", [True, False])
def test_a_new_tensor_is_zero(signed: bool) -> None:
    assert torch.equal(BlockwiseTensor(300, MAPS[signed]).read(0, 300), torch.zeros(300))


@pytest.mark.parametrize("signed", [True, False])
def test_quantize_blocks_finds_the_same_codes_as_a_search(signed: bool) -> None:
    """For the lowest and highest number with each upper 16 bits, and for numbers around all midpoints."""
    quantization_map = MAPS[signed]
    numbers = torch.arange(1 << 16)
    ends = torch.cat([numbers << 16, (numbers << 16) + 0xFFFF])
    everything = torch.where(ends >= 1 << 31, ends - (1 << 32), ends).to(torch.int32).view(torch.float32)
    bounds = quantization_map.midpoints[:-1]
    around = [
        bounds,
        bounds.nextafter(torch.tensor(1.0)),
        bounds.nextafter(torch.tensor(-1.0)),
        quantization_map.values,
    ]
    quotients = torch.cat([everything[everything.abs() <= 1], *around])
    blocks = F.pad(quotients, (1, -(quotients.numel() + 1) % BLOCK_ELEMENTS), value=1.0).view(-1, BLOCK_ELEMENTS)
    blocks[:, 0] = 1.0  # the absmax
    found, scales = quantize_blocks(blocks, quantization_map)
    assert torch.equal(scales, torch.ones(len(blocks)))
    assert torch.equal(found.int(), torch.bucketize(blocks, bounds, out_int32=True))
