"""Building an engine: learning rate of each step, ZeRO stage that runs, and refused combinations."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from spotune_trainer.engine.build import effective_stage, learning_rate
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.runs import Layout, Runs, train_generation
from tests.trainer.support.tiny import make_job

TOTAL = 20


@pytest.mark.parametrize(
    ("scheduler", "warmup"),
    [
        ("linear", {"warmupSteps": 4}),
        ("linear", {"warmupRatio": 0.2}),
        ("linear", {}),
        ("cosine", {"warmupRatio": 0.2}),
        ("constant", {}),
        ("constant_with_warmup", {"warmupSteps": 4}),
    ],
)
def test_the_learning_rate_equals_that_of_transformers_scheduler(scheduler: str, warmup: dict[str, float]) -> None:
    training = make_job("/model", training={"learningRate": 1e-3, "scheduler": scheduler, **warmup}).spec.training
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1e-3)
    stepped = get_scheduler(scheduler, optimizer, 4 if warmup else 0, TOTAL)
    expected = []
    for _ in range(TOTAL):
        expected.append(stepped.get_last_lr()[0])
        optimizer.step()
        stepped.step()
    rate = learning_rate(training, TOTAL)
    assert [rate(step) for step in range(TOTAL)] == pytest.approx(expected)
    assert rate(7) == rate(7), "asking changes nothing"


@pytest.mark.parametrize(
    ("stage", "dtype", "runs_as"),
    [
        (0, torch.float32, 0),
        (0, torch.bfloat16, 1),
        (1, torch.bfloat16, 1),
        (2, torch.bfloat16, 2),
        (3, torch.bfloat16, 3),
        (3, torch.float32, 3),
    ],
)
def test_stage_0_in_low_precision_runs_as_stage_1(stage: int, dtype: torch.dtype, runs_as: int) -> None:
    assert effective_stage(stage, dtype) == runs_as


@pytest.mark.slow
def test_frozen_weights_cannot_be_compiled_at_stage_3(runs: Runs) -> None:
    job = runs.job("causal", adapter={"lora": {"r": 4}}, execution={"compile": True})
    with pytest.raises(GroupFailedError, match=r"execution\.compile: layers with frozen weights"):
        train_generation(runs.empty("frozen"), job, Layout(world_size=1, zero_stage=3))
