"""8-bit moments: what is read is quantised to the same codes and scales again, whatever was written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from spotune_trainer.models.blockwise_quantization import BLOCK_ELEMENTS, Blockwise, dynamic_levels, nearest_levels

CPU = torch.device("cpu")
LEVELS = {signed: dynamic_levels(signed=signed, device=CPU) for signed in (True, False)}
LARGEST_GAP = {signed: float(levels.values.diff().max()) for signed, levels in LEVELS.items()}

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
blocks = st.lists(st.tuples(st.integers(1, BLOCK_ELEMENTS), st.lists(floats, min_size=1, max_size=8)), min_size=1)


def made_of(rows: list[tuple[int, list[float]]], signed: bool) -> Tensor:
    """Whole blocks, and a last one of some length; each repeats the few values that are given for it."""
    parts = [torch.tensor(values).repeat(BLOCK_ELEMENTS)[:BLOCK_ELEMENTS] for _, values in rows]
    parts[-1] = parts[-1][: rows[-1][0]]
    return torch.cat(parts) if signed else torch.cat(parts).abs()


def quantised(values: Tensor, signed: bool) -> Blockwise:
    found = Blockwise(values.numel(), LEVELS[signed])
    found.write(0, values)
    return found


@pytest.mark.parametrize("signed", [True, False])
@given(rows=blocks)
@example(rows=[(256, [-1.0, 0.5, 0.001])])  # the scale is that of a negative element
@example(rows=[(256, [0.0]), (7, [-0.0, 1e-30])])
@example(rows=[(9, [3e-39, -2e-45, 1e-42])])  # subnormal: codes may differ, values may not
def test_what_was_read_is_read_again_bit_for_bit(rows: list[tuple[int, list[float]]], signed: bool) -> None:
    once = quantised(made_of(rows, signed), signed)
    read = once.read(0, once.elements)
    again = quantised(read, signed)
    assert torch.equal(again.read(0, read.numel()), read)
    assert torch.equal(again.scales, once.scales)
    if bool((once.scales[once.scales > 0] > 1e-30).all()):
        assert torch.equal(again.codes, once.codes)


@pytest.mark.parametrize("signed", [True, False])
@given(rows=blocks)
def test_values_are_within_half_a_step_of_what_was_written(rows: list[tuple[int, list[float]]], signed: bool) -> None:
    values = made_of(rows, signed)
    found = quantised(values, signed)
    scales = found.scales.repeat_interleave(BLOCK_ELEMENTS)[: values.numel()]
    error = (found.read(0, values.numel()) - values).abs()
    assert bool((error <= scales * (LARGEST_GAP[signed] / 2 + 1e-6) + 1e-44).all())


@given(codes=st.lists(st.integers(0, 255), min_size=2, max_size=BLOCK_ELEMENTS), scale=st.floats(1e-30, 1e30))
def test_whatever_a_kernel_has_chosen_is_kept(codes: list[int], scale: float) -> None:
    """Its codes need not be the nearest ones; some element of a block has its scale."""
    found = Blockwise(len(codes), LEVELS[True])
    found.codes[0, : len(codes)] = torch.tensor([*codes[:-1], 255])
    found.scales.fill_(scale)
    again = quantised(found.read(0, len(codes)), signed=True)
    assert torch.equal(again.codes[0, : len(codes)], found.codes[0, : len(codes)])
    assert torch.equal(again.scales, found.scales)


def test_any_part_is_read_as_of_the_whole() -> None:
    values = torch.randn(3 * BLOCK_ELEMENTS + 11, generator=torch.Generator().manual_seed(0))
    found = quantised(values, signed=True)
    whole = found.read(0, values.numel())
    for start, end in ((0, 1), (255, 257), (300, 700), (768, 779), (5, 5)):
        assert torch.equal(found.read(start, end), whole[start:end])


def test_whole_blocks_are_written_where_they_belong() -> None:
    values = torch.randn(5 * BLOCK_ELEMENTS + 3, generator=torch.Generator().manual_seed(0))
    found = Blockwise(values.numel(), LEVELS[True])
    for start in range(0, values.numel(), 2 * BLOCK_ELEMENTS):
        found.write(start, values[start : start + 2 * BLOCK_ELEMENTS])
    expected = quantised(values, signed=True)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("signed", [True, False])
def test_it_begins_with_zeros(signed: bool) -> None:
    assert torch.equal(Blockwise(300, LEVELS[signed]).read(0, 300), torch.zeros(300))


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_level_is_found_as_by_a_search(signed: bool) -> None:
    """At the ends of what an fp32 number's upper half leaves open, around all bounds, and beyond the levels."""
    levels = LEVELS[signed]
    numbers = torch.arange(1 << 16)
    ends = torch.cat([numbers << 16, (numbers << 16) + 0xFFFF])
    everything = torch.where(ends >= 1 << 31, ends - (1 << 32), ends).to(torch.int32).view(torch.float32)
    bounds = levels.bounds[:-1]
    around = [bounds, bounds.nextafter(torch.tensor(1.0)), bounds.nextafter(torch.tensor(-1.0)), levels.values]
    quotients = torch.cat([everything[everything.abs() <= 1], *around])
    blocks = F.pad(quotients, (1, -(quotients.numel() + 1) % BLOCK_ELEMENTS), value=1.0).view(-1, BLOCK_ELEMENTS)
    blocks[:, 0] = 1.0  # the scale
    found, scales = nearest_levels(blocks, levels)
    assert torch.equal(scales, torch.ones(len(blocks)))
    assert torch.equal(found.int(), torch.bucketize(blocks, bounds, out_int32=True))
