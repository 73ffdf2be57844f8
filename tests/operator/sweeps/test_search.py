"""The parameters of trials: grid, random and tpe, reproducible from the recorded trials alone."""

import itertools
import json
import math
from typing import Any

import pytest

from spotune.sweep import FinetuneSweepSpec, TrialEvaluationStatus, TrialStatus
from spotune_operator.sweeps.search import suggest
from tests.api.support.sweep_files import a_sweep


def spec_of(algorithm: str, seed: int = 0) -> FinetuneSweepSpec:
    return a_sweep(search={"algorithm": algorithm, "trials": 60, "seed": seed}).spec


def trial(spec: FinetuneSweepSpec, number: int, trials: list[TrialStatus], **changes: Any) -> TrialStatus:
    parameters = json.loads(json.dumps(suggest(spec, number, trials)))  # as the API server returns them
    return TrialStatus(number=number, name=f"t5-search-{number}", parameters=parameters, **changes)


def test_a_grid_is_every_combination_in_the_order_of_the_paths() -> None:
    parameters = {"training.seed": {"integer": [1, 3]}, "training.globalBatchSize": {"values": [64, 32]}}
    spec = a_sweep(parameters=parameters, search={"algorithm": "grid"}).spec
    found = [suggest(spec, number, []) for number in range(6)]
    assert [tuple(each.values()) for each in found] == list(itertools.product([64, 32], [1, 2, 3]))
    assert list(found[0]) == ["training.globalBatchSize", "training.seed"]


@pytest.mark.parametrize("algorithm", ["random", "tpe"])
def test_samples_are_in_the_search_space_and_differ(algorithm: str) -> None:
    spec = spec_of(algorithm)
    found = [suggest(spec, number, []) for number in range(30)]
    rates = [each["training.learningRate"] for each in found]
    assert len(set(rates)) == 30
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)
    below = sum(rate < 1e-4 for rate in rates)
    assert 8 <= below <= 22, "half of a range in logarithms is below its geometric mean"
    assert {each["training.globalBatchSize"] for each in found} == {32, 64}
    assert {each["adapter.lora.r"] for each in found} <= set(range(8, 17))
    assert all(type(each["adapter.lora.r"]) is int for each in found)


def test_random_samples_depend_on_seed_and_number_alone() -> None:
    spec = spec_of("random")
    others = [trial(spec, 0, [], state="Complete", value=1.0)]
    assert suggest(spec, 7, []) == suggest(spec, 7, others)
    assert suggest(spec, 7, []) != suggest(spec_of("random", seed=1), 7, [])


def test_tpe_depends_on_the_recorded_trials_alone_and_finds_better_values_than_chance() -> None:
    """The loss is the distance of the learning rate from 1e-4, in orders of magnitude."""

    def searched(algorithm: str, seed: int) -> list[TrialStatus]:
        spec, trials = spec_of(algorithm, seed), list[TrialStatus]()
        for number in range(40):
            new = trial(spec, number, trials)
            loss = abs(math.log10(new.parameters["training.learningRate"]) + 4)
            trials.append(new.model_copy(update={"state": "Complete", "value": loss}))
        return trials

    first, again = searched("tpe", 0), searched("tpe", 0)
    assert first == again
    guided, chance = (
        sum(each.value or 0.0 for seed in range(4) for each in searched(algorithm, seed)[20:])
        for algorithm in ("tpe", "random")
    )
    assert guided < 0.8 * chance


def test_running_pruned_and_failed_trials_are_part_of_the_study() -> None:
    spec = spec_of("tpe")
    trials = [trial(spec, number, [], state="Complete", value=float(number)) for number in range(12)]
    seen = [TrialEvaluationStatus(step=100, value=0.1)]

    def suggestions(**changes: Any) -> list[dict[str, Any]]:
        added = trial(spec, 12, [], **changes)
        return [suggest(spec, number, [*trials, added]) for number in range(20, 40)]

    before = suggestions(state="Failed")
    assert before == [suggest(spec, number, trials) for number in range(20, 40)], "a failed trial teaches nothing"
    assert suggestions(state="Pruned", evaluations=seen, value=0.1) != before
    assert suggestions(state="Running") != before


def test_a_trial_with_edited_parameters_is_left_out() -> None:
    spec = spec_of("tpe")
    odd = TrialStatus(
        number=0, name="t5-search-0", parameters={"training.learningRate": "high"}, state="Complete", value=1
    )
    assert suggest(spec, 1, [odd]) == suggest(spec, 1, [])
