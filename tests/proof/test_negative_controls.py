"""The proof can fail: whatever is broken in the trainer is found, and nothing is found where nothing is broken."""

from __future__ import annotations

import re

import pytest

from spotune_trainer.training.worker import Worker
from tests.proof.checker import findings
from tests.proof.negative_controls import CONTROLS, ZERO_STAGE, Bench, Control, control_job, run_control
from tests.proof.references import References
from tests.trainer.support.runs import Layout, Runs


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    runs = Runs(tmp_path_factory.mktemp("controls"))
    return Bench(runs, References(runs, control_job(runs)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_found_where_nothing_is_broken(bench: Bench, world_size: int) -> None:
    directory = bench.interrupted()
    bench.go_on(directory, Worker, Layout(world_size, ZERO_STAGE))
    evidence = bench.evidence(directory)
    assert findings(evidence) == []
    assert [stretch.segment.world_size for stretch in evidence.stretches] == ([2] if world_size == 2 else [2, 3])


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_what_is_broken_is_found(bench: Bench, control: Control) -> None:
    found = run_control(control, bench)
    assert any(re.search(control.caught_by, finding) for finding in found), found
