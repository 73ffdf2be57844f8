"""A checkpoint of any ZeRO stage and world size restores bit for bit at any other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from spotune.plan.memory import Offload
from spotune_trainer.engine import zero_state
from tests.trainer.support.groups import run_group
from tests.trainer.support.layout_matrix import Cell, Matrix
from tests.trainer.support.layouts import Layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STAGES = {"float32": (0, 1, 2, 3), "bfloat16": (1, 2, 3)}  # stage 0 in bfloat16 is run as stage 1
MATRICES = [("float32", 2), *(pytest.param((dtype, 4), marks=pytest.mark.long) for dtype in ("bfloat16", "float32"))]
"""Data type, and the largest world size."""


OFFLOADED: list[tuple[int, int, Offload]] = [
    (1, 2, "optimizer"),
    (2, 3, "optimizer"),
    (3, 1, "optimizer"),
    (3, 4, "parameters"),
]


def layouts(dtype: str, ranks: int) -> list[Layout]:
    """All stages and world sizes, and some layouts with offload to host memory."""
    offloaded = [Layout(stage, world_size, dtype, what) for stage, world_size, what in OFFLOADED if world_size <= ranks]
    return offloaded + [
        Layout(stage, world_size, dtype) for world_size in range(1, ranks + 1) for stage in STAGES[dtype]
    ]


def matrix(rank: int, ranks: int, dtype: str, root: Path) -> list[Cell]:
    found = Matrix(root, layouts(dtype, ranks))
    found.run(rank)
    return found.cells


@pytest.fixture(scope="module", params=MATRICES, ids=str)
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    """Results of all pairs of layouts in one precision, from each reading rank."""
    dtype, ranks = request.param
    found = run_group(ranks, matrix, dtype, tmp_path_factory.mktemp(dtype), timeout=550)
    flat = [cell for of_rank in found for cell in of_rank]
    pairs = {(wrote, reads) for wrote in layouts(dtype, ranks) for reads in layouts(dtype, ranks)}
    assert {(cell.wrote, cell.reads) for cell in flat} == pairs
    return flat


def test_a_checkpoint_of_any_layout_restores_bit_for_bit_into_any_other(cells: list[Cell]) -> None:
    assert [cell for cell in cells if cell.differing] == []


def test_each_rank_reads_only_the_byte_ranges_that_it_needs(cells: list[Cell]) -> None:
    assert [cell for cell in cells if cell.bytes_read != cell.bytes_needed] == []
    whole = next(cell.bytes_needed for cell in cells if cell.reads.world_size == 1)
    read: Counter[tuple[Layout, Layout]] = Counter()
    for cell in cells:
        read[cell.wrote, cell.reads] += cell.bytes_read or 0
    for (_, reads), together in read.items():
        assert together == (whole * reads.world_size if reads.stage == 0 else whole)


def test_the_installed_deepspeed_version_is_supported() -> None:
    zero_state.check_version()
