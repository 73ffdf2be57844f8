"""The plan of a first start: layers are compiled only where torch.compile works."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

from spotune.errors import JobError
from spotune.plan.execution import COMPILE_SECONDS, saved_by_compiling
from spotune_trainer.driver import planning
from spotune_trainer.driver.planning import memory_copies, peer_copy_rate, plan_run
from spotune_trainer.job_directory.run_plan import RunPlan
from tests.trainer.support.measured import LLAMAS
from tests.trainer.support.runs import Layout, Runs, make_plan

GB = 10**9
PACKED = {"packing": True, "maxLength": 64}


MANY_STEPS = 10**12
"""So many that compiling pays even for a tiny model."""


def planned(runs: Runs, steps: int = MANY_STEPS, **execution: Any) -> RunPlan:
    """The plan of a job with packed rows on GPUs."""
    training = {"epochs": None, "maxSteps": steps}
    job = runs.job("causal", dataset=PACKED, training=training, workers={"gpus": 1}, execution=execution)
    return plan_run(job, runs.empty("planned"), None, lambda: 80 * GB)


def test_plan_compiles_packed_rows_on_gpus_and_gives_the_reason(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "missing_compiler", lambda *, on_gpus: None)
    plan = planned(runs)
    assert plan.compile
    assert plan.reason.endswith("layers compiled")


def test_plan_compiles_a_run_only_if_that_saves_more_than_it_takes(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "missing_compiler", lambda *, on_gpus: None)
    config, job = LlamaConfig(**LLAMAS["1.1B"]).to_dict(), runs.job("causal", dataset=PACKED, workers={"gpus": 1})
    rows = 64 * job.spec.training.global_batch_size
    enough = math.ceil(40 / (rows * 4.923e-6))  # seconds that a token saves at 1.1 billion parameters
    for steps, pays in ((round(1.02 * enough), True), (round(0.98 * enough), False)):
        saved = saved_by_compiling(config, job, steps)
        assert saved is not None
        assert (saved > COMPILE_SECONDS) == pays
    short = planned(runs, 100)
    assert not short.compile
    assert "layers not compiled: in 100 steps that would save 0.0 s" in short.reason
    assert planned(runs, 100, compile=True).compile
    assert RunPlan.from_json(short.to_json()).apply_execution(runs.job().spec.execution, 3).compile is False


def test_plan_does_not_compile_without_a_compiler(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    plan = planned(runs)
    assert not plan.compile
    assert plan.requested["compile"] == "auto"
    assert plan.reason.endswith("layers not compiled: torch.compile needs a compiler (gcc)")


def test_requested_compilation_without_a_compiler_is_a_job_error(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JobError, match=r"execution\.compile: torch\.compile needs a compiler \(gcc\)"):
        planned(runs, compile=True)


def test_fp8_without_a_compiler_is_a_job_error_and_not_left_uncompiled(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    job = runs.job("causal", "bfloat16", workers={"gpus": 1}, execution={"precision": "fp8"})
    with pytest.raises(JobError, match=r"execution\.compile: .* or set execution\.precision, fp8, to auto"):
        plan_run(job, runs.empty("planned"), None, lambda: 80 * GB)


@pytest.mark.parametrize(
    ("asked", "second_from", "copies"),
    [("auto", None, [1, 1, 1]), ("auto", 2, [1, 2, 2]), (0, 1, [0, 0, 0]), (2, None, [2, 2, 2])],
)
def test_auto_keeps_two_commits_in_memory_from_the_planned_number_of_workers(
    runs: Runs, asked: str | int, second_from: int | None, copies: list[int]
) -> None:
    job = runs.job(checkpoint={"memoryCopies": asked})
    plan = replace(make_plan(Layout(1, 2)), second_copy_from=second_from)
    assert [memory_copies(job, plan, workers) for workers in (1, 2, 3)] == copies


def test_plan_of_an_older_version_keeps_one_commit_in_memory(runs: Runs) -> None:
    value = make_plan(Layout(1, 2)).to_json()
    del value["secondCopyFrom"]
    assert memory_copies(runs.job(), RunPlan.from_json(value), 4) == 1


@pytest.mark.parametrize(
    ("asked", "planned_from", "copied"),
    [
        ({}, None, [False, False, False]),
        ({}, 2, [False, True, True]),
        ({"peerCopy": False}, 1, [False, False, False]),
        ({"peerCopy": True}, None, [True, True, True]),
        ({"memoryCopies": 0}, 1, [False, False, False]),
    ],
)
def test_nodes_copy_commits_from_the_planned_number_of_workers(
    runs: Runs, asked: dict[str, Any], planned_from: int | None, copied: list[bool]
) -> None:
    job = runs.job(checkpoint={"peerCopyRate": 50, **asked})
    plan = replace(make_plan(Layout(1, 2)), peer_copy_from=planned_from)
    rates = [50_000_000 if each else 0 for each in copied]
    assert [peer_copy_rate(job, plan, workers) for workers in (1, 2, 3)] == rates


def test_plan_of_an_older_version_copies_nothing_to_other_nodes(runs: Runs) -> None:
    value = make_plan(Layout(1, 2)).to_json()
    del value["peerCopyFrom"]
    assert peer_copy_rate(runs.job(), RunPlan.from_json(value), 4) == 0
