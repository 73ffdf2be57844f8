"""The plan's memory, compared with peaks that benchmarks/throughput.py measured on H200s."""

from __future__ import annotations

import pytest

from tests.trainer.support.planned_runs import MeasuredRun, runs_with_memory


@pytest.mark.parametrize("run", runs_with_memory(), ids=lambda run: f"{run.world_size}-{run.case['size']}")
def test_peak_is_within_a_tenth_of_the_plan(run: MeasuredRun) -> None:
    assert run.planned_bytes == pytest.approx(run.measured_bytes, rel=0.1)
