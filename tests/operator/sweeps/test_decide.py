"""Decisions about sweeps: which trials start, are pruned, suspended and resumed, and what the status says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from spotune.job import FinetuneJob
from tests.api.support.sweep_files import a_sweep
from tests.operator.sweeps.scenario import ASHA, GRID, UID, SweepScenario, run_to_the_end


def names(manifests: Any) -> list[str]:
    return [manifest["metadata"]["name"] for manifest in manifests]


def asha(**sections: Any) -> SweepScenario:
    """Nine trials that run."""
    scenario = SweepScenario(a_sweep(**{**ASHA, **sections}))
    scenario.reconcile()
    return scenario


def test_trials_start_up_to_max_concurrent_and_the_next_when_one_ends() -> None:
    scenario = SweepScenario()
    assert names(scenario.reconcile().create) == ["t5-search-0", "t5-search-1"]
    assert names(scenario.reconcile().create) == []
    scenario.completes(1, 2.5)
    assert names(scenario.reconcile().create) == ["t5-search-2"]
    assert scenario.states() == "RCR"
    counts = scenario.status.counts
    assert (counts.running, counts.complete, counts.waiting) == (2, 1, 3)
    assert scenario.status.phase == "Running"


def test_a_trial_is_a_job_with_its_parameters_owned_by_the_sweep() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    job = scenario.jobs["t5-search-1"]
    metadata = job["metadata"]
    parsed = FinetuneJob.model_validate({name: part for name, part in job.items() if name != "status"})
    assert (parsed.spec.training.global_batch_size, parsed.spec.training.learning_rate) == (32, 1e-4)
    assert metadata["labels"] | {"spotune.dev/sweep": "t5-search", "spotune.dev/trial": "1"} == metadata["labels"]
    assert json.loads(metadata["annotations"]["spotune.dev/trial-parameters"]) == {
        "training.globalBatchSize": 32, "training.learningRate": 1e-4
    }  # fmt: skip
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
        "FinetuneSweep",
        "t5-search",
        UID,
        True,
    )


def test_the_best_trial_and_its_model_are_in_the_status() -> None:
    scenario = SweepScenario()
    run_to_the_end(scenario, [2.0, 1.5, 0.5, 3.0, 0.75, 1.0])
    assert scenario.states() == "CCCCCC"
    best = scenario.status.best
    assert best is not None
    assert (best.number, best.name, best.value) == (2, "t5-search-2", 0.5)
    assert best.parameters == {"training.globalBatchSize": 32, "training.learningRate": 1e-3}
    assert best.output == "pvc://claim/t5-search-2/export"
    assert scenario.status.phase == "Complete"
    assert scenario.condition("Complete").status == "True"
    assert scenario.condition("Complete").message == "trials: 6 complete"
    assert scenario.condition("Ready").status == "True"
    assert scenario.condition("Stalled").status == scenario.condition("Reconciling").status == "False"


def test_the_highest_value_is_the_best_if_the_objective_is_maximized() -> None:
    template = yaml.safe_load(yaml.safe_dump(a_sweep().spec.template.model_dump(mode="json", exclude_unset=True)))
    template["spec"]["training"]["evaluation"] |= {"generate": True, "metrics": ["loss", "exactMatch"]}
    scenario = SweepScenario(a_sweep(**GRID, objective={"metric": "exactMatch"}, template=template))
    scenario.reconcile()
    for number, value in enumerate((0.25, 0.75)):
        scenario.completes(number, 1.0)
        scenario.report(number, evalScores={"exactMatch": value})
    scenario.reconcile()
    assert scenario.status.best is not None
    assert (scenario.status.best.number, scenario.status.best.value) == (1, 0.75)


def test_a_score_of_the_harness_is_that_of_the_exported_model() -> None:
    template = yaml.safe_load(yaml.safe_dump(a_sweep().spec.template.model_dump(mode="json", exclude_unset=True)))
    template["spec"]["training"]["evaluation"] |= {"harness": {"tasks": ["arc_easy"]}}
    sweep = a_sweep(**GRID, objective={"metric": "arc_easy/acc"}, template=template)
    scenario = SweepScenario(sweep)
    scenario.reconcile()
    for number, value in enumerate((0.25, 0.75)):
        scenario.evaluates(number, 50, 1.0)
        scenario.reconcile()
        scenario.completes(number, 1.0)
        scenario.report(number, evalScores={"arc_easy/acc": value})
    scenario.reconcile()
    assert scenario.states().startswith("CC")
    assert scenario.status.best is not None
    assert (scenario.status.best.number, scenario.status.best.value) == (1, 0.75)


def test_asha_prunes_all_but_the_best_third_and_frees_their_nodes() -> None:
    scenario = asha()
    for number in range(9):  # in ascending order of the loss: the first of each three is the best so far
        scenario.evaluates(number, 100, 1.0 + number)
        scenario.reconcile()
    assert scenario.states() == "RPPPPPPPP", "each trial is judged when it comes, and never waits for others"
    assert scenario.suspended() == [scenario.name(number) for number in range(1, 9)]
    label = scenario.jobs["t5-search-3"]["metadata"]["labels"]["spotune.dev/pruned"]
    assert label == "true"
    assert scenario.trial(3).message == "pruned at step 100: loss 4 is not among the best 1/3 of 4 trials at 100 steps"
    assert scenario.trial(3).value == 4.0
    assert scenario.status.counts.pruned == 8


def test_asha_compares_values_that_arrive_together() -> None:
    scenario = asha()
    for number in range(9):
        scenario.evaluates(number, 100, 9.0 - number)
    scenario.reconcile()
    assert scenario.states() == "RRRRRRRRR", "each one is the best so far"
    for number in range(9):
        scenario.evaluates(number, 300, float(number))
    scenario.reconcile()
    assert scenario.states() == "RPPPPPPPP"
    assert scenario.trial(0).rungs == [9.0, 0.0]


def test_the_first_evaluation_seen_after_a_rung_is_its_value() -> None:
    scenario = asha()
    scenario.evaluates(0, 99, 5.0)
    scenario.reconcile()
    assert scenario.trial(0).rungs == []
    scenario.evaluates(0, 350, 4.0)  # the operator was away meanwhile
    scenario.reconcile()
    assert scenario.trial(0).rungs == [4.0, 4.0], "of 100 and of 300 steps"
    assert [(each.step, each.value) for each in scenario.trial(0).evaluations] == [(99, 5.0), (350, 4.0)]


def test_an_evaluation_counts_once() -> None:
    scenario = asha()
    scenario.evaluates(0, 100, 5.0)
    scenario.reconcile()
    before = scenario.status
    scenario.report(0, step=140, loss=1.0)
    scenario.reconcile()
    assert scenario.status == before


def test_the_value_of_a_complete_trial_is_that_of_the_exported_model() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    scenario.evaluates(0, 500, 1.0)
    scenario.reconcile()
    scenario.completes(0)
    scenario.report(0, evalLoss=0.8, evalStep=400)  # the best checkpoint is of an earlier step
    scenario.reconcile()
    assert (scenario.trial(0).state, scenario.trial(0).value) == ("Complete", 0.8)


def test_a_job_that_ends_before_it_is_suspended_is_complete() -> None:
    scenario = asha()
    scenario.evaluates(0, 100, 1.0)
    scenario.evaluates(1, 100, 2.0)
    scenario.reconcile(actions=1)
    assert scenario.states()[:2] == "RP"
    scenario.completes(1, 0.5)
    scenario.reconcile()
    assert scenario.states()[:2] == "RC"
    assert scenario.suspended() == []


def test_a_pruned_job_that_a_user_resumes_goes_on() -> None:
    scenario = asha()
    scenario.evaluates(0, 100, 1.0)
    scenario.evaluates(1, 100, 2.0)
    scenario.reconcile()
    assert scenario.suspended() == ["t5-search-1"]
    scenario.patch("t5-search-1", {"spec": {"suspend": False}})
    assert scenario.reconcile().patch == []
    assert scenario.states()[:2] == "RP"


def test_a_failed_trial_counts_and_stops_no_other() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    scenario.fails(0)
    assert names(scenario.reconcile().create) == ["t5-search-2"]
    assert scenario.states() == "FRR"
    assert scenario.trial(0).message == "the loss is not finite"
    assert scenario.suspended() == []
    assert scenario.status.phase == "Running"


def test_a_failed_job_that_is_repaired_runs_again() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    scenario.fails(0)
    scenario.reconcile()
    scenario.report(0, conditions=[])
    scenario.reconcile()
    assert scenario.states()[0] == "R"


def test_too_many_failed_trials_end_the_sweep() -> None:
    scenario = SweepScenario(a_sweep(**GRID, budget={"maxFailedTrials": 2}))
    scenario.reconcile()
    scenario.fails(0)
    scenario.reconcile()
    scenario.fails(1)
    assert scenario.reconcile().create == []
    assert scenario.status.phase == "Running", "trial 2 runs"
    scenario.completes(2, 1.0)
    scenario.reconcile()
    assert scenario.status.phase == "Failed"
    failed = scenario.condition("Failed")
    assert (failed.status, failed.reason) == ("True", "TooManyFailedTrials")
    assert failed.message == (
        "2 trials have failed, and budget.maxFailedTrials is 2; t5-search-0: the loss is not finite"
    )
    assert scenario.status.best is not None


def test_no_trial_starts_after_the_gpu_hours_are_spent() -> None:
    scenario = SweepScenario(a_sweep(**GRID, budget={"maxGpuHours": 2}))
    scenario.reconcile()
    scenario.report(0, gpuSeconds={"spot": 3000, "onDemand": 600})
    scenario.completes(0, 1.0)
    assert names(scenario.reconcile().create) == ["t5-search-2"], "one hour is spent"
    scenario.report(1, gpuSeconds={"spot": 3601})
    scenario.completes(1, 2.0)
    assert scenario.reconcile().create == []
    assert scenario.states() == "CCR", "the running trial goes on"
    assert scenario.status.gpu_hours == pytest.approx(2.0, abs=0.001)
    assert scenario.status.counts.waiting == 0
    scenario.completes(2, 3.0)
    scenario.reconcile()
    complete = scenario.condition("Complete")
    assert (complete.status, complete.reason) == ("True", "BudgetSpent")
    assert complete.message == "trials: 3 complete; 2.0 GPU hours are used, and budget.maxGpuHours is 2"


def test_the_usage_of_a_deleted_job_still_counts() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    scenario.report(0, gpuSeconds={"spot": 7200})
    scenario.completes(0, 1.0)
    scenario.reconcile()
    del scenario.jobs["t5-search-0"]
    scenario.reconcile()
    assert scenario.status.gpu_hours == 2.0
    assert scenario.states()[0] == "C", "its result is kept, and it is not trained again"
    assert scenario.creations.count("t5-search-0") == 1


def test_a_running_job_that_somebody_deletes_is_created_again_with_its_parameters() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    before = scenario.jobs.pop("t5-search-1")
    scenario.reconcile()
    assert scenario.jobs["t5-search-1"]["spec"] == before["spec"]


def test_suspending_suspends_what_runs_and_resuming_resumes_that_alone() -> None:
    scenario = asha()
    scenario.evaluates(0, 100, 1.0)
    scenario.evaluates(1, 100, 2.0)
    scenario.reconcile()
    scenario.completes(2, 3.0)
    scenario.patch("t5-search-3", {"spec": {"suspend": True}})  # by a user
    scenario.sweep = a_sweep(**ASHA, suspend=True)
    scenario.reconcile()
    assert scenario.status.phase == "Suspending"
    assert scenario.suspended() == [scenario.name(number) for number in (0, 1, 3, 4, 5, 6, 7, 8)]
    assert scenario.condition("Suspended").status == "Unknown"
    for number in (0, 3, 4, 5, 6, 7, 8):
        scenario.has_condition(number, "Suspended", "Suspended", "")
    scenario.reconcile()
    assert scenario.status.phase == "Suspended"
    assert scenario.condition("Suspended").status == "True"
    scenario.sweep = a_sweep(**ASHA)
    scenario.reconcile()
    assert scenario.suspended() == ["t5-search-1", "t5-search-3"]
    assert "annotations" not in scenario.jobs["t5-search-0"]["metadata"] or (
        "spotune.dev/suspended-by-sweep" not in scenario.jobs["t5-search-0"]["metadata"]["annotations"]
    )


def test_a_suspended_sweep_starts_nothing() -> None:
    scenario = SweepScenario(a_sweep(**GRID, suspend=True))
    assert scenario.reconcile().create == []
    assert scenario.status.trials == []
    assert scenario.status.phase == "Suspended"


def test_a_combination_that_is_no_valid_job_has_failed_at_once() -> None:
    """Each value is valid with the first values of the others, so only the trial itself shows it."""
    parameters = {
        "training.optimizer": {"values": ["adamw", "adafactor"]},
        "training.adamBeta1": {"values": [0.9, 0.8]},
    }
    sections = GRID | {"parameters": parameters, "maxConcurrent": 4}
    scenario = SweepScenario(a_sweep(**sections))
    decision = scenario.reconcile()
    assert scenario.states() == "RRRF"
    assert names(decision.create) == ["t5-search-0", "t5-search-1", "t5-search-2"]
    assert scenario.trial(3).message == (
        "the job would be invalid: spec.training.adamBeta1: is not used by adafactor: remove it"
    )


def test_more_trials_may_be_asked_for_later() -> None:
    scenario = SweepScenario(a_sweep(**{**GRID, "search": {"algorithm": "grid", "trials": 2}}))
    run_to_the_end(scenario, [1.0, 2.0])
    assert scenario.status.phase == "Complete"
    scenario.sweep = a_sweep(**GRID)
    assert names(scenario.reconcile().create) == ["t5-search-2", "t5-search-3"]
    assert scenario.condition("Complete").status == "False"


def test_a_name_that_another_job_has_is_reported() -> None:
    scenario = SweepScenario(taken=frozenset({"t5-search-1"}))
    decision = scenario.reconcile()
    assert names(decision.create) == ["t5-search-0"]
    assert scenario.status.phase == "Stalled"
    assert scenario.condition("Stalled").message == (
        "a FinetuneJob t5-search-1 exists that this sweep did not create: delete it, or create a sweep with another "
        "name"
    )
    assert decision.requeue_after is not None


def test_a_job_that_the_api_server_refuses_is_tried_again() -> None:
    scenario = SweepScenario(refused={"t5-search-0": "exceeded quota"})
    decision = scenario.reconcile()
    assert names(decision.create) == ["t5-search-0", "t5-search-1"]
    assert (
        scenario.condition("Stalled").message == "the API server rejected the FinetuneJob t5-search-0: exceeded quota"
    )
    assert decision.requeue_after == 60.0


def test_a_stalled_job_is_named_and_an_invalid_one_has_failed() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    scenario.has_condition(0, "Stalled", "ImagePullBackOff", "the image does not exist")
    scenario.has_condition(1, "Stalled", "InvalidSpec", "spec.storage is wrong")
    scenario.reconcile()
    assert scenario.states() == "RFR"
    assert scenario.condition("Stalled").message == "trial t5-search-0 is stalled: the image does not exist"
    assert scenario.condition("Ready").message == "see condition Stalled"


def test_many_evaluations_are_thinned() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    for step in range(1, 400):
        scenario.evaluates(0, step, 1.0 / step)
        scenario.reconcile()
    seen = scenario.trial(0).evaluations
    assert 16 <= len(seen) <= 32
    assert seen[-1].step == 399
    assert [each.step for each in seen] == sorted({each.step for each in seen})


def test_the_loss_of_a_training_function_is_that_of_its_reports() -> None:
    template = {"spec": {"training": {"function": "train:main"}}}
    parameters = {"training.config.lr": {"values": [0.1, 0.2]}}
    sections: dict[str, Any] = {
        "parameters": parameters,
        "search": {"algorithm": "grid"},
        "template": template,
        "maxConcurrent": 2,
    }
    for metric, status in (("loss", {"loss": 0.5}), ("accuracy", {"evalScores": {"accuracy": 0.5}, "evalStep": 7})):
        scenario = SweepScenario(a_sweep(**sections, earlyStopping={}, objective={"metric": metric}))
        scenario.reconcile()
        scenario.report(0, step=7, **status)
        scenario.reconcile()
        assert [(each.step, each.value) for each in scenario.trial(0).evaluations] == [(7, 0.5)]


def test_a_job_without_the_objective_has_failed() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    scenario.completes(0)
    scenario.reconcile()
    assert scenario.trial(0).message == "the job ended without a value of the objective"


def test_decisions_are_pure() -> None:
    scenario = asha()
    scenario.evaluates(0, 100, 1.0)
    scenario.evaluates(1, 100, 2.0)
    first = scenario.decide()
    assert scenario.decide() == replace(first)
