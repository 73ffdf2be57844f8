"""The checker finds every defect of the negative controls, and nothing in an intact run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from spotune_trainer.training.worker import Worker
from tests.proof.checker import findings
from tests.proof.negative_controls import (
    CONTROLS,
    LABELS_CONTROLS,
    MIXTURE_CONTROLS,
    PREFERENCE_CONTROLS,
    ZERO_STAGE,
    Control,
    ControlBench,
    control_job,
    labels_control_job,
    mixture_control_job,
    preference_control_job,
    run_control,
)
from tests.proof.references import References
from tests.trainer.support.runs import Layout, Runs

pytestmark = pytest.mark.slow
QUICK = {
    "cursor one sample too far",
    "first moment of a parameter not restored",
    "torn checkpoint trusted",
    "export by a zombie generation",
}
"""One control each for samples, states, checkpoints and exports. `make test-long` and `make proof` run all of them."""


def parameters(controls: Sequence[Control]) -> list[Any]:
    """The controls as parameters of a test, those that are not quick for `make test-long`."""
    return [
        pytest.param(control, id=control.name, marks=() if control.name in QUICK else pytest.mark.long)
        for control in controls
    ]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ControlBench:
    runs = Runs(tmp_path_factory.mktemp("controls"))
    return ControlBench(runs, References(runs, control_job(runs)))


@pytest.fixture(scope="module")
def mixture_bench(tmp_path_factory: pytest.TempPathFactory) -> ControlBench:
    runs = Runs(tmp_path_factory.mktemp("mixture"))
    return ControlBench(runs, References(runs, mixture_control_job(runs)))


@pytest.fixture(scope="module")
def preference_bench(tmp_path_factory: pytest.TempPathFactory) -> ControlBench:
    runs = Runs(tmp_path_factory.mktemp("preference"))
    return ControlBench(runs, References(runs, preference_control_job(runs)))


@pytest.fixture(scope="module")
def labels_bench(tmp_path_factory: pytest.TempPathFactory) -> ControlBench:
    runs = Runs(tmp_path_factory.mktemp("labels"))
    return ControlBench(runs, References(runs, labels_control_job(runs)))


@pytest.mark.parametrize(
    ("data", "world_size"),
    [
        ("bench", 2),
        *(
            pytest.param(data, world_size, marks=pytest.mark.long)
            for data, world_size in (
                ("bench", 3),
                ("mixture_bench", 2),
                ("mixture_bench", 3),
                ("preference_bench", 2),
                ("preference_bench", 3),
                ("labels_bench", 2),
                ("labels_bench", 3),
            )
        ),
    ],
)
def test_intact_trainer_has_no_findings(request: pytest.FixtureRequest, data: str, world_size: int) -> None:
    bench: ControlBench = request.getfixturevalue(data)
    directory = bench.interrupted_run()
    bench.resume(directory, Worker, Layout(world_size, ZERO_STAGE))
    evidence = bench.evidence(directory)
    assert findings(evidence) == []
    assert [each.segment.world_size for each in evidence.compared] == ([2] if world_size == 2 else [2, 3])
    assert bool(evidence.mixture) == (data == "mixture_bench")


@pytest.mark.parametrize("control", parameters(CONTROLS))
def test_defect_is_found(bench: ControlBench, control: Control) -> None:
    found = run_control(control, bench)
    assert any(re.search(control.caught_by, finding) for finding in found), found


@pytest.mark.parametrize("control", parameters(MIXTURE_CONTROLS))
def test_defect_of_a_mixture_is_found(mixture_bench: ControlBench, control: Control) -> None:
    found = run_control(control, mixture_bench)
    assert any(re.search(control.caught_by, finding) for finding in found), found


@pytest.mark.parametrize("control", parameters(PREFERENCE_CONTROLS))
def test_defect_of_a_preference_objective_is_found(preference_bench: ControlBench, control: Control) -> None:
    found = run_control(control, preference_bench)
    assert any(re.search(control.caught_by, finding) for finding in found), found


@pytest.mark.parametrize("control", parameters(LABELS_CONTROLS))
def test_defect_of_a_head_is_found(labels_bench: ControlBench, control: Control) -> None:
    found = run_control(control, labels_bench)
    assert any(re.search(control.caught_by, finding) for finding in found), found
