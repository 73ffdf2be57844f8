"""The table of large models, and what the plan says of the memory that they took."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.large_models import BY_PROCESSOR
from benchmarks.large_models_tables import OUTPUT, LargeModelTable
from tests.trainer.support.planned_runs import MeasuredRun, read_runs

RUNS = [run for run in read_runs(OUTPUT) if not run.case["name"].endswith(BY_PROCESSOR)]
"""With states in host memory, the present plan is that of steps on the device."""


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.case["name"])
def test_planned_memory_is_within_ten_percent_of_the_measured(run: MeasuredRun) -> None:
    assert run.planned_bytes == pytest.approx(run.measured_bytes, rel=0.1)


def test_every_case_has_a_line_and_so_has_the_rival() -> None:
    _, _, *lines = LargeModelTable().lines()
    assert len(lines) == len(read_runs(OUTPUT)) + 1
    assert all(line.count("|") == 8 for line in lines)
    assert "Liger" in lines[-1]


def test_there_is_no_table_before_anything_is_measured(tmp_path: Path) -> None:
    assert list(LargeModelTable(tmp_path / "none").lines()) == []
