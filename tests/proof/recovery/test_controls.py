"""Wrong bytes in memory are found by the intact trainer, and by the checker where a defect believes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.proof.checker import findings
from tests.proof.negative_controls import Control, ControlBench, control_job, run_control
from tests.proof.recovery.controls import HELD_FILES, RANK_CONTROLS, HeldFiles
from tests.proof.references import References
from tests.trainer.support.runs import Runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ControlBench:
    runs = Runs(tmp_path_factory.mktemp("controls"))
    return ControlBench(runs, References(runs, control_job(runs)))


def parameters(defects: Sequence[Control | HeldFiles]) -> list[Any]:
    """The defects as parameters of a test, all but those of checksums for `make test-long`."""
    return [
        pytest.param(each, id=each.name, marks=() if "checksum" in each.name else pytest.mark.long) for each in defects
    ]


@pytest.mark.long
@pytest.mark.parametrize("held", parameters(HELD_FILES))
def test_intact_trainer_reads_the_volume_instead(bench: ControlBench, held: HeldFiles) -> None:
    directory = held.resume(bench, held.intact)
    assert findings(bench.evidence(directory)) == []


@pytest.mark.parametrize("control", parameters(RANK_CONTROLS))
def test_believed_bytes_are_found(bench: ControlBench, control: Control) -> None:
    found = run_control(control, bench)
    assert any(re.search(control.caught_by, finding) for finding in found), found
