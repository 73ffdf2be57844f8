"""What the estimated time of a step depends on, and where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotune.plan.memory import precision_of
from spotune.plan.speed.gpus import GpuSpeed
from spotune.plan.speed.step_time import RATES, StepTime, estimate_step_time
from spotune.plan.training_setup import Layout, TrainingSetup
from tests.api.plan.test_layout import LLAMA_8B

H200 = GpuSpeed(989.4e12, 4.8e12)
SETUP = replace(LLAMA_8B, global_batch_size=16, compiled=True, chunked_loss=True)
LAYOUT = Layout(1, 2, gradient_checkpointing=False)


def step(setup: TrainingSetup = SETUP, layout: Layout = LAYOUT, workers: int = 1, gpu: GpuSpeed = H200) -> StepTime:
    found = estimate_step_time(setup, layout, workers, gpu)
    assert found is not None
    return found


def test_parts_follow_from_what_limits_them() -> None:
    one = step()
    slower_memory = step(gpu=replace(H200, memory_bytes_per_second=2.4e12))
    assert slower_memory.products == one.products
    assert slower_memory.memory == pytest.approx(2 * one.memory)
    assert step(workers=2).products == pytest.approx(one.products / 2)
    assert step(replace(SETUP, lora_rank=16)).products == pytest.approx(one.products * 2 / 3)
    assert step(replace(SETUP, fp8="fp8")).seconds < step(replace(SETUP, fp8="fp8-rowwise")).seconds < one.seconds


def test_recomputed_layers_cost_a_forward_pass_without_attention() -> None:
    kept, recomputed = step(), step(layout=replace(LAYOUT, gradient_checkpointing=True))
    half = step(layout=replace(LAYOUT, gradient_checkpointing=True, kept_layers=16))
    assert recomputed.attention == kept.attention
    assert kept.products < half.products < recomputed.products < 4 / 3 * kept.products


def test_documents_in_a_row_shorten_attention_alone() -> None:
    long = replace(SETUP, sequence_length=131072)
    one, many = step(long), step(replace(long, documents_per_row=32))
    assert many.attention < one.attention / 4
    assert replace(many, attention=one.attention, mfu=one.mfu) == one


def test_mfu_counts_scores_within_documents_alone() -> None:
    long = replace(SETUP, sequence_length=131072)
    steps = step(long), step(replace(long, documents_per_row=32)), step(replace(long, sequence_length=4096))
    one, many, short = (each.mfu * each.seconds / each.tokens for each in steps)
    assert many == pytest.approx(short)
    assert many < 0.3 * one


def test_states_on_the_host_cost_their_copies() -> None:
    host = step(replace(SETUP, offload="optimizer"))
    copied = 12 * SETUP.trained.count / RATES.host_bytes_per_second
    assert host.host_copies + host.optimizer == pytest.approx(copied)
    assert step(replace(SETUP, offload="optimizer"), workers=2).host_copies == pytest.approx(host.host_copies / 2)


@pytest.mark.parametrize(
    "setup",
    [
        replace(SETUP, on_cpu=True),
        replace(SETUP, offload="optimizer", precision=precision_of("float16")),
        replace(SETUP, precision=precision_of("bfloat16", "muon", SETUP.trained)),
        replace(SETUP, precision=precision_of("bfloat16", fixed_point=True)),
    ],
    ids=["cpu", "the processor updates", "whole matrices", "fixed point"],
)
def test_what_was_not_measured_has_no_estimate(setup: TrainingSetup) -> None:
    assert estimate_step_time(setup, LAYOUT, 1, H200) is None
