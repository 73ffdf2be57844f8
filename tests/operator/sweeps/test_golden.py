"""FinetuneSweeps in, trials and status out: the first jobs of each search, and the status of a whole life.

After a wanted change write the files under golden/ again, and read the difference:

    SPOTUNE_WRITE_GOLDEN=1 .venv/bin/pytest tests/operator/sweeps/test_golden.py
    git diff tests/operator/sweeps/golden
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spotune_operator.cli.operator import as_yaml
from tests.api.support.sweep_files import SWEEP_FILE, a_sweep
from tests.command_line import run_spotune
from tests.operator.sweeps.scenario import ASHA, GRID, SweepScenario, run_to_the_end
from tests.operator.sweeps.test_restart import run

GOLDEN = Path(__file__).parent / "golden"
SEARCHES = ("random", "tpe")
LIVES: dict[str, dict[str, Any]] = {
    "grid": GRID,
    "asha": ASHA,
    "failed": GRID | {"budget": {"maxFailedTrials": 1}},
}


def check(name: str, actual: str) -> None:
    file = GOLDEN / name
    if os.environ.get("SPOTUNE_WRITE_GOLDEN"):
        file.write_text(actual)
    assert actual == file.read_text(), f"{file} holds something else (this module's docstring says how to write it)"


@pytest.mark.parametrize("algorithm", SEARCHES)
def test_first_trials(algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP_FILE.replace("algorithm: random", f"algorithm: {algorithm}"))
    code, out, error = run_spotune(capsys, "render", file)
    assert code == 0, error
    check(f"trials-{algorithm}.yaml", out)


@pytest.mark.parametrize("name", LIVES)
def test_status_of_a_sweep_that_has_ended(name: str) -> None:
    scenario = SweepScenario(a_sweep(**LIVES[name]))
    match name:
        case "grid":
            run_to_the_end(scenario, [2.0, 1.5, 0.5, 3.0, 0.75, 1.0])
        case "asha":
            run(scenario, {})
        case _:
            scenario.reconcile()
            scenario.fails(0)
            scenario.completes(1, 1.0)
            scenario.reconcile()
    check(f"status-{name}.yaml", as_yaml([scenario.status.model_dump(mode="json", exclude_none=True)]))


def test_every_golden_file_belongs_to_a_case() -> None:
    expected = [*(f"trials-{name}.yaml" for name in SEARCHES), *(f"status-{name}.yaml" for name in LIVES)]
    assert sorted(file.name for file in GOLDEN.iterdir()) == sorted(expected)
