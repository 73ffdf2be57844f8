"""A sweep whose trials run a command of the user: its arguments, what it reports, and the best model."""

from __future__ import annotations

from typing import Any

from tests.api.support.sweep_files import a_sweep
from tests.operator.sweeps.scenario import SweepScenario

COMMAND = ["torchrun", "train.py"]
SECTIONS: dict[str, Any] = {
    "parameters": {"training.config.learningRate": {"values": [0.1, 0.2, 0.3]}},
    "search": {"algorithm": "grid"},
    "objective": {"metric": "loss"},
    "earlyStopping": {"algorithm": "asha", "minSteps": 10, "reductionFactor": 3},
    "maxConcurrent": 3,
    "template": {
        "spec": {
            "training": {"command": COMMAND, "code": "/data/code", "config": {"epochs": 8, "learningRate": 0.0}},
            "workers": {"count": 2, "gpus": 0},
        }
    },
}


def test_trials_of_a_command_get_their_parameters_are_pruned_and_compared_by_what_they_report() -> None:
    scenario = SweepScenario(a_sweep(**SECTIONS))
    scenario.reconcile()
    trainings = [job["spec"]["training"] for job in scenario.jobs.values()]
    assert [training["command"] for training in trainings] == [COMMAND] * 3
    assert [training["config"] for training in trainings] == [
        {"epochs": 8, "learningRate": rate} for rate in (0.1, 0.2, 0.3)
    ]
    for number, loss in enumerate((2.0, 3.0, 1.0)):
        scenario.report(number, phase="Training", step=10, loss=loss)
        scenario.reconcile()
    assert scenario.states() == "RPR"
    assert scenario.suspended() == ["t5-search-1"]
    for number, loss in ((0, 0.75), (2, 0.5)):
        scenario.completes(number)
        scenario.report(number, loss=loss)
    scenario.reconcile()
    best = scenario.status.best
    assert best is not None
    assert (scenario.status.phase, best.number, best.value) == ("Complete", 2, 0.5)
    assert best.parameters == {"training.config.learningRate": 0.3}
