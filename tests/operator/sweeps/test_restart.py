"""An operator that is stopped at any point of any reconcile: no trial is lost, and none exists twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from spotune.sweep import FinetuneSweepStatus
from tests.api.support.sweep_files import a_sweep
from tests.operator.sweeps.scenario import ASHA, SweepScenario

TPE: dict[str, Any] = {"search": {"algorithm": "tpe", "trials": 14}, "maxConcurrent": 3}
RANDOM: dict[str, Any] = TPE | {"search": {"algorithm": "random", "trials": 9}}


def loss_of(number: int, step: int) -> float:
    """A trial's loss: it falls with the steps, and depends on the trial."""
    return (7 * number) % 11 + 100.0 / step


def advance(scenario: SweepScenario) -> bool:
    """Let every running job make its next evaluation, or end; returns whether there was one."""
    found = False
    for trial in scenario.status.trials:
        job = scenario.jobs.get(trial.name)
        if job is None or job["spec"].get("suspend") or job.get("status", {}).get("phase") == "Complete":
            continue
        found = True
        step = job.get("status", {}).get("step", 0) + 100
        if step >= 1000:
            scenario.completes(trial.number, loss_of(trial.number, 1000))
        else:
            scenario.evaluates(trial.number, step, loss_of(trial.number, step))
    return found


def run(scenario: SweepScenario, stops: dict[int, int]) -> SweepScenario:
    """Run a sweep to its end.

    Args:
        scenario: The sweep.
        stops: After how many actions the operator is stopped, by number of the reconcile; it then starts again.
    """
    for number in itertools.count():
        scenario.reconcile(stops.get(number))
        if number in stops:
            scenario.reconcile()
        if not advance(scenario) and scenario.status.phase == "Complete":
            return scenario
        assert number < 300, f"it does not end: {scenario.states()}"
    raise AssertionError("unreachable")


def outcome(scenario: SweepScenario) -> list[tuple[int, str, Any, Any]]:
    return [(each.number, each.state, each.parameters, each.value) for each in scenario.status.trials]


@pytest.mark.parametrize(
    "sections", [RANDOM, pytest.param(TPE, marks=pytest.mark.long), ASHA], ids=["random", "tpe", "grid-and-asha"]
)
def test_a_restart_at_any_action_changes_nothing(sections: dict[str, Any]) -> None:
    expected = run(SweepScenario(a_sweep(**sections)), {})
    assert len(set(expected.creations)) == len(expected.creations) == expected.sweep.spec.num_trials
    assert len(expected.jobs) == len(expected.creations)
    if sections is ASHA or sections is TPE:
        assert "P" in expected.states()
    for reconcile, actions in itertools.product(range(0, 24, 3), range(4)):
        stopped = run(SweepScenario(a_sweep(**sections)), {reconcile: actions})
        assert outcome(stopped) == outcome(expected), (reconcile, actions)
        assert stopped.creations == expected.creations
        assert stopped.status.best == expected.status.best


def test_an_operator_that_is_stopped_at_every_reconcile_still_ends() -> None:
    expected = run(SweepScenario(a_sweep(**RANDOM)), {})
    stopped = run(SweepScenario(a_sweep(**RANDOM)), dict.fromkeys(range(300), 1))
    assert outcome(stopped) == outcome(expected)


def test_a_lost_status_is_restored_from_the_jobs() -> None:
    """As after a restore from a backup: the jobs are adopted with their parameters, states and values."""
    scenario = SweepScenario(a_sweep(**RANDOM))
    for _ in range(4):
        scenario.reconcile()
        advance(scenario)
    scenario.reconcile()
    before, jobs = scenario.status, dict(scenario.jobs)
    scenario.status = FinetuneSweepStatus()
    scenario.reconcile()
    assert scenario.jobs.keys() == jobs.keys()
    assert [(each.number, each.state, each.parameters) for each in scenario.status.trials] == [
        (each.number, each.state, each.parameters) for each in before.trials
    ]


def test_the_parameters_of_a_job_are_true_and_not_those_of_the_status() -> None:
    """Two operators run for a moment while one replaces the other: the job that was created first is the trial."""
    scenario = SweepScenario(a_sweep(**RANDOM))
    first = scenario.decide()
    scenario.reconcile(actions=1)
    other = first.create[0]
    other["metadata"]["annotations"]["spotune.dev/trial-parameters"] = '{"training.learningRate": 0.0005}'
    scenario.create(other)
    scenario.reconcile()
    assert scenario.trial(0).parameters == {"training.learningRate": 0.0005}
    assert scenario.creations == ["t5-search-0", "t5-search-1", "t5-search-2"]
