"""ASHA: the rungs, and the same answers as a study of Optuna that runs without interruption."""

import random
from typing import Literal

import optuna
import pytest

from spotune.sweep import TrialPruningSpec
from spotune_operator.sweeps.pruning import continues, reached_rungs, rung_steps

PRUNING = TrialPruningSpec(algorithm="asha", min_steps=100, reduction_factor=3)


@pytest.mark.parametrize(("step", "rungs"), [(0, 0), (99, 0), (100, 1), (299, 1), (300, 2), (899, 2), (900, 3)])
def test_rungs_are_powers_of_the_reduction_factor(step: int, rungs: int) -> None:
    assert reached_rungs(PRUNING, step) == rungs
    assert [rung_steps(PRUNING, rung) for rung in range(3)] == [100, 300, 900]


def test_without_pruning_there_are_no_rungs() -> None:
    assert reached_rungs(TrialPruningSpec(), 10_000) == 0


def test_the_best_third_continues() -> None:
    others = [float(value) for value in range(1, 9)]
    assert [continues(value, others, 3, "minimize") for value in (0.0, 2.5, 3.5, 9.0)] == [True, True, False, False]
    assert [continues(value, others, 3, "maximize") for value in (9.0, 6.5, 5.5, 0.0)] == [True, True, False, False]


def test_of_the_first_trials_the_best_one_continues() -> None:
    assert continues(5.0, [], 3, "minimize")
    assert not continues(6.0, [5.0], 3, "minimize")
    assert continues(4.0, [5.0], 3, "minimize")


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_answers_are_those_of_a_study_that_is_never_rebuilt(
    seed: int, factor: int, direction: Literal["minimize", "maximize"]
) -> None:
    """Trials evaluate in random order; each rung has one evaluation."""
    source = random.Random(seed)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=10, reduction_factor=factor)
    study = optuna.create_study(direction=direction, pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0))
    trials = [study.ask() for _ in range(20)]
    rungs: list[list[float]] = [[] for _ in range(4)]
    reached = [0] * len(trials)
    active = set(range(len(trials)))
    answers = 0
    while active:
        number = source.choice(sorted(active))
        rung, value = reached[number], source.random()
        trials[number].report(value, step=10 * factor**rung)
        expected = not trials[number].should_prune()
        assert continues(value, rungs[rung], factor, direction) == expected
        rungs[rung].append(value)
        reached[number] += 1
        answers += 1
        if not expected or reached[number] == len(rungs):
            active.remove(number)
    assert answers > len(trials)
