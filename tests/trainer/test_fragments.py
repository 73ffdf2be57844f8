"""What an engine of one ZeRO stage and world size has committed, an engine of any other holds bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spotune_trainer.checkpoint import fragments
from spotune_trainer.checkpoint.fragment import STATES
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.layout import JobDirectory
from tests.trainer.groups import run_group
from tests.trainer.layouts import (
    Layout,
    build,
    differences,
    leave_process_group,
    opened,
    process_group,
    restore,
    save,
    state_of,
    train,
)

pytestmark = pytest.mark.timeout(600)

RANKS = 4
STAGES = {"float32": (0, 1, 2, 3), "bfloat16": (1, 2, 3)}  # stage 0 in bfloat16 is run as stage 1
EXPECTED = "expected.pt"
STATE_BYTES = 4 * len(STATES)


@dataclass(frozen=True)
class Cell:
    """What a rank found when its engine had restored the checkpoint of another layout."""

    wrote: Layout
    reads: Layout
    rank: int
    differing: tuple[str, ...]
    bytes_read: int
    bytes_needed: int


def layouts(dtype: str, world_size: int) -> list[Layout]:
    return [Layout(stage, world_size, dtype) for stage in STAGES[dtype]]


def home(root: Path, layout: Layout) -> JobDirectory:
    """Where the checkpoint of a layout lies."""
    return JobDirectory(root / f"{layout.dtype}-{layout.stage}-{layout.world_size}")


def name_of(layout: Layout) -> CheckpointName:
    return CheckpointName(layout.steps, 1)


def read_by(engine: Any, checkpoint: Checkpoint) -> tuple[int, int]:
    """Restore a checkpoint; bytes of state that this rank has read, and needed."""
    with counted_reads() as reads:
        restore(engine, checkpoint)
    needed = fragments.needed_fragments(engine)
    headers = checkpoint.bytes - STATE_BYTES * elements(checkpoint)
    return reads[0] - headers, STATE_BYTES * sum(fragment.states["fp32"].numel() for fragment in needed)


def elements(checkpoint: Checkpoint) -> int:
    return sum(torch.Size(shape).numel() for shape in checkpoint.manifest.parameters.values())


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Bytes that this thread has asked the kernel for by then, by the kernel's own count (proc(5), `rchar`)."""
    account = Path("/proc/thread-self/io")
    found: list[int] = []
    before = account.read_text()
    yield found
    after = account.read_text()
    found.append(rchar(after) - rchar(before) - len(before))


def rchar(account: str) -> int:
    return int(account.split()[1])


def write(root: Path, layout: Layout) -> None:
    """Train at a layout, commit, and note what DeepSpeed says that was."""
    engine, directory = build(layout), home(root, layout)
    train(engine, layout.steps)
    save(engine, directory, name_of(layout))
    expected = state_of(engine)
    if engine.global_rank == 0:
        torch.save(expected, directory.root / EXPECTED)


@cache
def expected_of(path: Path) -> dict[str, Tensor]:
    """What the writer of a checkpoint held, read once in each process."""
    found: dict[str, Tensor] = torch.load(path)
    return found


def read(root: Path, layout: Layout) -> list[Cell]:
    """Restore the checkpoint of every layout, one after the other."""
    engine, cells = build(layout), []
    for world_size in range(1, RANKS + 1):
        for other in layouts(layout.dtype, world_size):
            directory = home(root, other)
            checkpoint = opened(directory, name_of(other))
            bytes_read, bytes_needed = read_by(engine, checkpoint)
            differing = differences(engine, expected_of(directory.root / EXPECTED))
            cells.append(Cell(other, layout, engine.global_rank, tuple(differing), bytes_read, bytes_needed))
    return cells


def matrix(rank: int, _: int, dtype: str, root: Path) -> list[Cell]:
    """Write at every layout, then read at every layout, by as many of the pool's processes as it has ranks."""
    leave_process_group()
    cells: list[Cell] = []
    for phase in ("write", "read"):
        # From the largest group down: all processes meet between the phases, and DeepSpeed, which numbers the modules
        # that it has seen in a process, finds the same numbers on all ranks whenever it trains.
        for world_size in range(RANKS, rank, -1):
            with process_group(rank, world_size, root / f"{phase}-{world_size}"):
                for layout in layouts(dtype, world_size):
                    if phase == "write":
                        write(root, layout)
                    else:
                        cells += read(root, layout)
    return cells


@pytest.fixture(scope="module", params=STAGES)
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    """All pairs of layouts in one precision, as each rank of the reader found them."""
    dtype: str = request.param
    found = run_group(RANKS, matrix, dtype, tmp_path_factory.mktemp(dtype), timeout=550)
    stages, world_sizes = STAGES[dtype], range(1, RANKS + 1)
    flat = [cell for of_rank in found for cell in of_rank]
    assert {(cell.wrote, cell.reads) for cell in flat} == {
        (Layout(a, m, dtype), Layout(b, n, dtype))
        for a in stages
        for m in world_sizes
        for b in stages
        for n in world_sizes
    }
    return flat


def test_any_stage_and_world_size_holds_what_any_other_wrote_bit_for_bit(cells: list[Cell]) -> None:
    assert [cell for cell in cells if cell.differing] == []


def test_each_rank_reads_the_ranges_that_it_needs_and_nothing_else(cells: list[Cell]) -> None:
    assert [cell for cell in cells if cell.bytes_read != cell.bytes_needed] == []
    whole = next(cell.bytes_needed for cell in cells if cell.reads.world_size == 1)
    read: Counter[tuple[Layout, Layout]] = Counter()
    for cell in cells:
        read[cell.wrote, cell.reads] += cell.bytes_read
    for (_, reads), together in read.items():
        assert together == (whole * reads.world_size if reads.stage == 0 else whole)
