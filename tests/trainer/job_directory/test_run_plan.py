"""`plan.json`: later starts use the plan of the first one, and changes are recorded with their step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spotune.errors import JobError
from spotune.job import ExecutionSpec
from spotune_trainer.job_directory.run_plan import LIBRARIES, RunPlan, library_versions, requested

PLAN = RunPlan(
    version=1,
    fingerprint="0123",
    zero_stage=2,
    micro_batch_size=8,
    gradient_checkpointing=False,
    compile=False,
    reason="fits",
    data={"train": "a" * 64, "eval": "b" * 64},
    requested=requested(ExecutionSpec()),
)


def execution(**values: object) -> ExecutionSpec:
    return ExecutionSpec.model_validate(values)


def test_a_plan_survives_json() -> None:
    plan = PLAN.change(12, micro_batch_size=4)
    assert RunPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_change_is_recorded_with_its_step() -> None:
    plan = PLAN.change(12, micro_batch_size=4)
    assert (plan.version, plan.micro_batch_size) == (2, 4)
    assert plan.changes == ({"step": 12, "microBatchSize": [8, 4]},)
    again = plan.change(20, micro_batch_size=2, zero_stage=3)
    assert again.version == 3
    assert again.changes[-1] == {"step": 20, "microBatchSize": [4, 2], "zeroStage": [2, 3]}


def test_a_change_to_the_same_value_is_not_recorded() -> None:
    assert PLAN.change(12, micro_batch_size=8) is PLAN


def test_an_edit_of_execution_is_applied_once() -> None:
    plan = PLAN.apply_execution(execution(zeroStage=3), step=40)
    assert (plan.zero_stage, plan.micro_batch_size) == (3, 8)
    assert plan.changes == ({"step": 40, "zeroStage": [2, 3]},)
    assert plan.apply_execution(execution(zeroStage=3), step=50) == plan


SPARING = replace(PLAN, gathered_layers=2, whole_gradients=True)
"""A plan that uses spare memory."""


def test_an_edit_of_execution_turns_off_spare_memory_settings() -> None:
    kept, edited = (SPARING.apply_execution(execution(microBatchSize=size), step=3) for size in (8, 16))
    assert (kept.gathered_layers, kept.whole_gradients) == (2, True)
    assert (edited.gathered_layers, edited.whole_gradients) == (0, False)
    assert edited.changes[-1]["wholeGradients"] == [True, False]
    assert edited.changes[-1]["gatheredLayers"] == [2, 0]


def test_an_old_plan_has_no_spare_memory_settings() -> None:
    older = {name: value for name, value in PLAN.to_json().items() if name not in ("gatheredLayers", "wholeGradients")}
    assert RunPlan.from_json(older) == PLAN


def test_offloading_turns_off_spare_memory_settings() -> None:
    plan = replace(SPARING, zero_stage=3).apply_execution(execution(offload="optimizer"), step=3)
    assert (plan.gathered_layers, plan.whole_gradients) == (0, False)


def test_less_memory_turns_off_whole_gradients_then_gathered_layers_then_halves_the_micro_batch() -> None:
    plan, seen = replace(SPARING, micro_batch_size=3), []
    while (less := plan.use_less_memory(step=5)) != plan:
        plan = less
        seen.append((plan.whole_gradients, plan.gathered_layers, plan.micro_batch_size))
    assert seen == [(False, 2, 3), (False, 0, 3), (False, 0, 1)]
    changed = [set(change) - {"step"} for change in plan.changes]
    assert changed == [{"wholeGradients"}, {"gatheredLayers"}, {"microBatchSize"}]


def test_evaluation_batch_is_four_micro_batches_or_one_with_gathered_layers() -> None:
    assert (PLAN.evaluation_batch_size(0), SPARING.evaluation_batch_size(0)) == (32, 8)
    assert PLAN.evaluation_batch_size(48) == 48, "as the job asks for"


def test_less_memory_in_the_evaluation_halves_its_batch_and_leaves_the_training_as_it_is() -> None:
    plan = PLAN.use_less_memory(step=5, evaluation_batch=48)
    assert [plan.evaluation_batch_size(asked) for asked in (0, 48, 12)] == [24, 24, 12]
    assert plan.changes == ({"step": 5, "evaluationBatchLimit": [None, 24]},)
    assert RunPlan.from_json(plan.to_json()) == plan
    assert PLAN.use_less_memory(step=5, evaluation_batch=1) == PLAN


def test_less_memory_in_the_evaluation_of_one_sample_turns_off_spare_memory_settings() -> None:
    plan = SPARING.use_less_memory(step=5, evaluation_batch=1).use_less_memory(step=6, evaluation_batch=1)
    assert (plan.whole_gradients, plan.gathered_layers, plan.micro_batch_size) == (False, 0, SPARING.micro_batch_size)
    assert plan.use_less_memory(step=7, evaluation_batch=1) == plan


def test_an_adaptation_is_not_undone_by_the_same_request() -> None:
    """8 ran out of memory and became 4, which stays until the user requests another value."""
    asked = PLAN.apply_execution(execution(microBatchSize=8), step=0)
    halved = asked.change(30, micro_batch_size=4)
    assert halved.apply_execution(execution(microBatchSize=8), step=30).micro_batch_size == 4
    assert halved.apply_execution(execution(microBatchSize=2), step=30).micro_batch_size == 2


def test_offloading_raises_the_stage_of_a_plan() -> None:
    assert PLAN.apply_execution(execution(offload="optimizer"), step=40).zero_stage == 2
    plan = PLAN.apply_execution(execution(offload="parameters"), step=40)
    assert plan.changes == ({"step": 40, "zeroStage": [2, 3]},)


def test_going_back_to_auto_keeps_the_present_values() -> None:
    plan = PLAN.apply_execution(execution(zeroStage=3), step=40).apply_execution(execution(), step=50)
    assert plan.zero_stage == 3
    assert plan.requested["zeroStage"] == "auto"


def test_changed_data_is_refused() -> None:
    PLAN.check_data(PLAN.data)
    with pytest.raises(JobError, match=r"dataset\.eval: its index\.json changed .* \(bbbbbbbbbbbb then, cccc.* now\)"):
        PLAN.check_data({**PLAN.data, "eval": "c" * 64})
    with pytest.raises(JobError, match=r"dataset\.eval: .* missing now"):
        PLAN.check_data({"train": "a" * 64})
    replace(PLAN, data={}).check_data({"train": "c" * 64})


def test_library_versions_are_recorded() -> None:
    versions = library_versions()
    assert versions.keys() == {"python", *LIBRARIES}
    assert all(versions.values())


KEEPING = replace(PLAN, gradient_checkpointing=True, kept_layers=3, micro_batch_size=1)


def test_fewer_layers_are_kept_after_a_worker_ran_out_of_memory() -> None:
    plan = KEEPING.use_less_memory(step=5)
    assert (plan.kept_layers, plan.micro_batch_size) == (1, 1)
    least = plan.use_less_memory(step=6)
    assert least.kept_layers == 0
    assert least.use_less_memory(step=7) == least


def test_a_restart_keeps_the_layers_of_the_plan_and_an_edit_recomputes_all() -> None:
    offloading = execution(offload="optimizer")
    assert KEEPING.apply_execution(offloading, step=5).kept_layers == 3
    assert KEEPING.apply_execution(execution(zeroStage=3), step=5).kept_layers == 0


def test_offloading_activations_recomputes_layers() -> None:
    plan = PLAN.apply_execution(execution(offloadActivations=True), step=5)
    assert plan.gradient_checkpointing
    assert plan.offload_activations
