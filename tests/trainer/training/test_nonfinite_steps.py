"""A step with a nonfinite loss or gradient changes nothing on any rank, at any ZeRO stage; too many fail the run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from spotune.errors import JobError
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.nonfinite_steps import BadSteps, nan_unless_finite
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.overflowing_worker import OVERFLOWING_STEPS, OverflowingWorker
from tests.trainer.support.runs import STEPS, Layout, Runs, committed, committed_state, train_generation

pytestmark = pytest.mark.slow

LONG = pytest.mark.long


def train_with_overflows(runs: Runs, layout: Layout, dtype: str = "float32", **training: Any) -> JobDirectory:
    directory = runs.empty("overflown")
    job = runs.job(dtype=dtype, training=training, checkpoint={"every": 1, "keep": 20})
    train_generation(directory, job, layout, OverflowingWorker)
    return directory


@pytest.mark.parametrize(
    ("layout", "dtype", "optimizer"),
    [
        *[(Layout(2, stage), "float32", "adamw") for stage in range(4)],
        *[(Layout(2, stage), "bfloat16", "adamw") for stage in (1, 3)],
        pytest.param(Layout(2, 2), "bfloat16", "adamw", marks=LONG),  # the layout and precision of muon below
        *[(Layout(2, stage), "float32", "adamw8bit") for stage in (0, 3)],
        pytest.param(Layout(2, 1), "float32", "adamw8bit", marks=LONG),
        (Layout(2, 3), "bfloat16", "schedule_free_adamw"),
        (Layout(2, 2), "bfloat16", "muon"),
        (Layout(2, 1), "float32", "adafactor"),
    ],
    ids=str,
)
def test_bad_step_changes_no_weights_and_is_counted(runs: Runs, layout: Layout, dtype: str, optimizer: str) -> None:
    settings = {"scheduler": "constant_with_warmup"} if optimizer == "schedule_free_adamw" else {"emaDecay": 0.9}
    directory = train_with_overflows(runs, layout, dtype, optimizer=optimizer, **settings)
    records = surviving_steps(directory)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["step"] for record in records if record["skipped"]] == list(OVERFLOWING_STEPS)
    assert [record["step"] for record in records if record["loss"] is None] == list(OVERFLOWING_STEPS)
    before, after, later = (committed_state(directory, step) for step in (2, 4, 5))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(after[name], later[name]) for name in after)
    assert all(bool(torch.isfinite(state).all()) for state in later.values())
    manifests = {step: committed(directory, step).manifest for step in (2, 3, 4, 5, STEPS)}
    assert [manifest.bad_steps for manifest in manifests.values()] == [0, 1, 2, 0, 0]
    assert [manifest.optimizer_step for manifest in manifests.values()] == [2, 2, 2, 3, STEPS - len(OVERFLOWING_STEPS)]
    logs = directory.generation_logs(1)
    skipped = [event for event in files.read_lines(logs.events) if event["event"] == "step-skipped"]
    assert [event["step"] for event in skipped] == list(OVERFLOWING_STEPS)
    assert all(len(event["samples"].split(", ")) > 8 for event in skipped)
    assert (files.read_json(logs.progress) or {})["skippedSteps"] == len(OVERFLOWING_STEPS)


def test_too_many_bad_steps_in_a_row_fail_the_run_and_name_the_samples(runs: Runs) -> None:
    expected = r"JobError: training: the loss of step 4 is nan \(samples [\d, .]+\), after 1 such steps in a row"
    with pytest.raises(GroupFailedError, match=expected):
        train_with_overflows(runs, Layout(2, 2), maxBadSteps=1)


def test_bad_steps_before_a_restart_count(runs: Runs) -> None:
    directory = train_with_overflows(runs, Layout(2, 1))
    interrupted = runs.interrupted(directory, 3)
    job = runs.job(training={"maxBadSteps": 1}, checkpoint={"every": 1, "keep": 20})
    with pytest.raises(GroupFailedError, match="the loss of step 4 is nan"):
        train_generation(interrupted, job, Layout(1, 0), OverflowingWorker)


def test_resuming_between_bad_steps_gives_the_same_weights(runs: Runs) -> None:
    directory = train_with_overflows(runs, Layout(2, 1))
    interrupted = runs.interrupted(directory, 3)
    job = runs.job(checkpoint={"every": 1, "keep": 20})
    train_generation(interrupted, job, Layout(2, 1), OverflowingWorker)
    expected, found = committed_state(directory, STEPS), committed_state(interrupted, STEPS)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert committed(interrupted, STEPS).manifest.optimizer_step == STEPS - len(OVERFLOWING_STEPS)


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_nonfinite_loss_or_gradient_makes_a_step_bad(loss: float, grad_norm: float) -> None:
    steps = BadSteps(limit=1)

    def samples() -> str:
        assert steps.in_a_row > 1, "samples are read only for the step that fails the run"
        return "1, 2"

    assert not steps.record(1, 1.0, None, samples)
    assert steps.record(2, loss, grad_norm, samples)
    assert not steps.record(3, 1.0, 1.0, samples)
    assert (steps.in_a_row, steps.total) == (0, 1)
    assert steps.record(4, loss, grad_norm, samples)
    with pytest.raises(JobError, match=r"of step 5 is .*\(samples 1, 2\).*lower training.learningRate"):
        steps.record(5, loss, grad_norm, samples)


def test_weight_becomes_nan_only_for_a_nonfinite_loss() -> None:
    weight = 2 / 3
    assert torch.tensor(5.0) * nan_unless_finite(torch.tensor(5.0), weight) == torch.tensor(5.0) * weight
    for loss in (math.nan, math.inf):
        assert nan_unless_finite(torch.tensor(loss), weight).isnan()
