"""Host memory of a snapshot is there before its pages are locked."""

import mmap
from pathlib import Path

import pytest
import torch

from spotune_trainer.checkpoint.snapshot import populate_pages

_ELEMENTS = 1 << 24  # 64 MiB


def resident_bytes() -> int:
    """Memory of this process that has pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_pages_of_new_memory_are_populated() -> None:
    buffer = torch.empty(_ELEMENTS)
    before = resident_bytes()
    populate_pages(buffer)
    assert resident_bytes() - before > 0.9 * buffer.nbytes


@pytest.mark.parametrize("part", [slice(None), slice(1, -1)])
def test_content_stays_as_it_is(part: slice) -> None:
    buffer = torch.arange(10_000.0)
    populate_pages(buffer[part])
    assert torch.equal(buffer, torch.arange(10_000.0))


def test_no_memory_needs_no_pages() -> None:
    populate_pages(torch.empty(0))
