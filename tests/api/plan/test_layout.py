"""The choice of ZeRO stage, micro-batch and gradient checkpointing, and the error if nothing fits."""

import math
import re
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune.errors import JobError
from spotune.plan.config_reader import read_architecture
from spotune.plan.known_models import KNOWN_CONFIGS
from spotune.plan.layout import (
    PASS_OVERHEAD_TOKENS,
    SATURATING_TOKENS,
    LayoutChoice,
    LayoutRequest,
    balanced_micro_batch_size,
    choose_layout,
)
from spotune.plan.memory import BFLOAT16, FLOAT32, GB, Offload, precision_of
from spotune.plan.training_setup import Layout, TrainingSetup


def setup_for(name: str, **changes: Any) -> TrainingSetup:
    t5 = "t5" in name
    values: dict[str, Any] = {
        "architecture": read_architecture(KNOWN_CONFIGS[name]),
        "precision": BFLOAT16,
        "global_batch_size": 96,
        "sequence_length": 512,
        "target_length": 128 if t5 else 0,
    }
    return TrainingSetup(**values | changes)


T5_SMALL = setup_for("google-t5/t5-small")
T5_11B = setup_for("google-t5/t5-11b", precision=FLOAT32)
LLAMA_8B = setup_for("meta-llama/llama-3.1-8b", sequence_length=4096)


def stage_for(setup: TrainingSetup, world_size: int, gigabytes: float) -> int:
    return choose_layout(setup, world_size, int(gigabytes * GB)).layout.zero_stage


def test_stage_rises_as_devices_get_smaller() -> None:
    chosen = {gigabytes: stage_for(LLAMA_8B, 8, gigabytes) for gigabytes in (80, 56, 48, 34)}

    assert chosen == {80: 1, 56: 2, 48: 2, 34: 3}


def test_float32_that_fits_whole_is_not_sharded() -> None:
    assert stage_for(setup_for("google-t5/t5-small", precision=FLOAT32), 4, 80) == 0


def test_mixed_precision_starts_at_stage_1() -> None:
    assert stage_for(T5_SMALL, 4, 80) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("gigabytes", [24, 40, 80, 141])
def test_no_lower_stage_fits_and_the_chosen_one_does(world_size: int, gigabytes: int) -> None:
    setup = setup_for("google-t5/t5-3b")
    try:
        choice = choose_layout(setup, world_size, gigabytes * GB)
    except JobError:
        chosen = 4
    else:
        chosen = choice.layout.zero_stage
        assert choice.memory.total_bytes <= setup.budget_bytes(gigabytes * GB)
    for lower in range(1, chosen):
        most_frugal = Layout(lower, 1, gradient_checkpointing=True)  # type: ignore[arg-type]
        assert setup.memory(world_size, most_frugal).total_bytes > setup.budget_bytes(gigabytes * GB)


FRUGAL: dict[str, Any] = {"zero_stage": 3, "micro_batch_size": 1, "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("gigabytes", "batch", "asked", "gathered", "is_whole"),
    [
        (141, 96, {"zero_stage": 3, "micro_batch_size": 1}, 32, True),
        (80, 96, FRUGAL, 32, True),
        (80, 96, {"zero_stage": 3}, 32, False),
        (40, 96, FRUGAL, 14, False),
        (33, 96, FRUGAL, 0, False),
        (80, 8, FRUGAL, 32, False),
        (80, 96, {"zero_stage": 2}, 0, False),
    ],
    ids=["room", "asked for all", "room for layers", "for some of them", "no room", "one pass", "stage 2"],
)
def test_spare_memory_at_stage_3_goes_to_gathered_layers_then_whole_gradients(
    gigabytes: int, batch: int, asked: dict[str, Any], gathered: int, is_whole: bool
) -> None:
    setup = replace(LLAMA_8B, global_batch_size=batch)
    choice = choose_layout(setup, 8, gigabytes * GB, LayoutRequest(**asked))

    assert (choice.layout.gathered_layers, choice.layout.whole_gradients) == (gathered, is_whole)
    assert choice.memory.total_bytes <= setup.budget_bytes(gigabytes * GB)
    if asked != FRUGAL:
        assert ("layers gathered once a step" in choice.reason) is (gathered > 0)
        assert ("gradients reduced once a step" in choice.reason) is is_whole


def test_one_more_gathered_layer_would_not_fit() -> None:
    layout = choose_layout(LLAMA_8B, 8, 40 * GB, LayoutRequest(**FRUGAL)).layout
    budget, more = LLAMA_8B.budget_bytes(40 * GB), replace(layout, gathered_layers=layout.gathered_layers + 1)

    assert LLAMA_8B.memory(8, layout).total_bytes <= budget < LLAMA_8B.memory(8, more).total_bytes


def test_single_and_offloading_workers_use_no_spare_memory() -> None:
    offloading = replace(T5_SMALL, offload="optimizer")
    for setup, world_size in ((T5_SMALL, 1), (offloading, 8)):
        layout = choose_layout(setup, world_size, 80 * GB, LayoutRequest(zero_stage=3)).layout
        assert (layout.gathered_layers, layout.whole_gradients) == (0, False)


def test_gradient_checkpointing_is_off_if_the_micro_batch_saturates_the_device() -> None:
    roomy = choose_layout(LLAMA_8B, 4, 141 * GB)
    tight = choose_layout(LLAMA_8B, 4, 80 * GB)

    assert not roomy.layout.gradient_checkpointing
    assert tight.layout.gradient_checkpointing


def test_gradient_checkpointing_is_on_if_it_enlarges_a_tiny_micro_batch() -> None:
    setup = setup_for("meta-llama/llama-3.2-1b", sequence_length=128)
    without = choose_layout(setup, 4, 15 * GB, LayoutRequest(gradient_checkpointing=False)).layout
    free = choose_layout(setup, 4, 15 * GB).layout

    assert without.micro_batch_size * 128 < 2048
    assert free.gradient_checkpointing
    assert free.micro_batch_size > without.micro_batch_size


def test_micro_batch_is_at_most_a_workers_share() -> None:
    assert choose_layout(T5_SMALL, 4, 80 * GB).layout.micro_batch_size == 24
    assert choose_layout(replace(T5_SMALL, global_batch_size=2), 5, 80 * GB).layout.micro_batch_size == 1


def test_explicit_values_are_kept_and_the_rest_is_chosen_around_them() -> None:
    stage_3 = choose_layout(T5_SMALL, 2, 80 * GB, LayoutRequest(zero_stage=3))
    of_7 = choose_layout(T5_SMALL, 2, 80 * GB, LayoutRequest(micro_batch_size=7))
    recomputed = choose_layout(T5_SMALL, 2, 80 * GB, LayoutRequest(gradient_checkpointing=True))

    assert stage_3.layout == Layout(3, 48, gradient_checkpointing=False, gathered_layers=12)
    assert "ZeRO stage 3 (as set)" in stage_3.reason
    assert of_7.layout == Layout(1, 7, gradient_checkpointing=False)
    assert recomputed.layout == Layout(1, 48, gradient_checkpointing=True)


def test_no_more_layers_are_recomputed_than_an_explicit_micro_batch_needs() -> None:
    layout = choose_layout(LLAMA_8B, 8, 80 * GB, LayoutRequest(micro_batch_size=2)).layout
    assert layout == Layout(1, 2, True, kept_layers=layout.kept_layers)
    assert 0 < layout.kept_layers < LLAMA_8B.architecture.decoder.layers
    more = replace(layout, kept_layers=layout.kept_layers + 1)
    assert LLAMA_8B.memory(8, layout).total_bytes <= LLAMA_8B.budget_bytes(80 * GB)
    assert LLAMA_8B.memory(8, more).total_bytes > LLAMA_8B.budget_bytes(80 * GB)


def test_reason_names_stage_micro_batch_and_memory() -> None:
    choice = choose_layout(T5_SMALL, 4, 80 * GB)

    assert choice.reason.startswith(
        "ZeRO stage 1 (the lowest that fits), micro-batch 24 without gradient checkpointing: "
    )
    assert choice.reason.endswith(" of 80.0 GB per worker")


def all_asked(micro_batch_size: int, gigabytes: int) -> LayoutChoice:
    request = LayoutRequest(zero_stage=2, micro_batch_size=micro_batch_size, gradient_checkpointing=False)
    return choose_layout(T5_SMALL, 2, gigabytes * GB, request)


def test_a_complete_request_is_never_overruled() -> None:
    assert all_asked(16, 80).fits
    assert all_asked(16, 80).reason == "as set in execution"

    too_large = all_asked(48, 8)
    assert too_large.layout == Layout(2, 48, gradient_checkpointing=False)
    assert not too_large.fits
    assert "may run out of memory" in too_large.reason


@pytest.mark.parametrize("gigabytes", [40, 80])
def test_error_for_t5_11b_in_float32_on_one_gpu_names_memory_and_remedies(gigabytes: int) -> None:
    with pytest.raises(JobError) as raised:
        choose_layout(T5_11B, 1, gigabytes * GB)

    text = str(raised.value)
    assert f"does not fit on 1 worker with {gigabytes}.0 GB each" in text
    assert "weights 45.2 GB, gradients 45.2 GB, optimizer 135.7 GB" in text
    assert "model.dtype bfloat16" in text


@pytest.mark.parametrize("gigabytes", [40, 80])
def test_error_names_a_sufficient_number_of_workers(gigabytes: int) -> None:
    with pytest.raises(JobError) as raised:
        choose_layout(T5_11B, 1, gigabytes * GB)
    named = re.search(r"(\d+) workers of this size", str(raised.value))
    assert named

    assert choose_layout(T5_11B, int(named[1]), gigabytes * GB).layout.zero_stage == 3
    with pytest.raises(JobError):
        choose_layout(T5_11B, int(named[1]) // 2, gigabytes * GB)


@pytest.mark.parametrize(("gigabytes", "offload"), [(80, "optimizer"), (40, "parameters")])
def test_error_names_the_smallest_sufficient_offload_and_its_host_memory(gigabytes: int, offload: Offload) -> None:
    with pytest.raises(JobError) as raised:
        choose_layout(T5_11B, 1, gigabytes * GB)
    named = re.search(rf"execution\.offload {offload} \((\d+\.\d) GB of host memory per worker\)", str(raised.value))
    assert named

    choice = choose_layout(replace(T5_11B, offload=offload), 1, gigabytes * GB)
    assert float(named[1]) == round(choice.memory.host_bytes / GB, 1)


def test_error_for_cpu_workers_does_not_suggest_offload() -> None:
    with pytest.raises(JobError, match=r"What would help: (?!.*offload)"):
        choose_layout(replace(T5_11B, on_cpu=True), 1, 40 * GB)


def test_error_names_every_restrictive_setting() -> None:
    request = LayoutRequest(zero_stage=1, micro_batch_size=64, gradient_checkpointing="auto")
    with pytest.raises(JobError) as raised:
        choose_layout(replace(LLAMA_8B, sequence_length=16_384), 2, 80 * GB, request)

    text = str(raised.value)
    assert (
        "What would help: execution.zeroStage auto, execution.microBatchSize auto, a shorter dataset.maxLength" in text
    )
    assert "workers of this size" not in text
    assert "model.dtype" not in text


def test_error_suggests_gradient_checkpointing() -> None:
    request = LayoutRequest(gradient_checkpointing=False)
    with pytest.raises(JobError, match=r"without gradient checkpointing.*execution\.gradientCheckpointing auto"):
        choose_layout(LLAMA_8B, 2, 40 * GB, request)


def test_error_uses_the_plural_for_several_workers() -> None:
    with pytest.raises(JobError, match="does not fit on 2 workers"):
        choose_layout(T5_11B, 2, 40 * GB)


def test_compiled_layers_with_frozen_weights_are_not_sharded() -> None:
    adapted = replace(LLAMA_8B, lora_rank=16)
    assert choose_layout(adapted, 4, 20 * GB).layout.zero_stage == 3
    with pytest.raises(JobError, match="even at ZeRO stage 2"):
        choose_layout(replace(adapted, compiled=True), 4, 16 * GB)


def test_whole_matrices_are_not_sharded_and_the_error_names_the_optimizer() -> None:
    with_muon = replace(LLAMA_8B, precision=precision_of("bfloat16", "muon", LLAMA_8B.trained))
    assert choose_layout(with_muon, 8, 80 * GB).layout.zero_stage <= 2
    assert choose_layout(LLAMA_8B, 8, 36 * GB).layout.zero_stage == 3
    expected = r"even at ZeRO stage 2.*another training\.optimizer, which ZeRO stage 3 and execution\.offload support"
    with pytest.raises(JobError, match=expected) as raised:
        choose_layout(with_muon, 8, 36 * GB)
    assert "execution.offload optimizer" not in str(raised.value)


def test_gradients_in_fixed_point_are_not_sharded_and_the_error_names_the_setting() -> None:
    reproducible = replace(LLAMA_8B, precision=precision_of("bfloat16", fixed_point=True))
    micro_batch = LayoutRequest(micro_batch_size=2)
    assert choose_layout(reproducible, 8, 160 * GB, micro_batch).layout.zero_stage == 1
    with pytest.raises(JobError, match=r"even at ZeRO stage 2.*execution\.reproducible none") as raised:
        choose_layout(reproducible, 8, 80 * GB, micro_batch)
    assert "a smaller execution.microBatchSize" in str(raised.value)
    assert "execution.offload optimizer" not in str(raised.value)


def test_quantised_weights_fit_where_whole_ones_do_not_and_are_not_sharded() -> None:
    whole = replace(LLAMA_8B, lora_rank=16)
    quantised = replace(whole, quantised=True)

    assert choose_layout(whole, 4, 20 * GB).layout.zero_stage == 3
    assert choose_layout(quantised, 4, 20 * GB).layout.zero_stage < 3
    with pytest.raises(JobError, match="ZeRO stage 2"):
        choose_layout(quantised, 4, 6 * GB)


def test_offload_of_parameters_goes_to_stage_3() -> None:
    offloaded = replace(LLAMA_8B, offload="parameters")

    assert choose_layout(offloaded, 1, 40 * GB).layout.zero_stage == 3
    assert choose_layout(replace(LLAMA_8B, offload="optimizer"), 1, 80 * GB).layout.zero_stage == 1


@pytest.mark.parametrize(
    ("offload", "stage", "needed"), [("parameters", 2, "stage 3"), ("optimizer", 0, "stage 1 or more")]
)
def test_offload_that_contradicts_an_explicit_stage_is_rejected(offload: Any, stage: Any, needed: str) -> None:
    with pytest.raises(JobError, match=rf"execution\.zeroStage {stage} does not support .*offload {offload}.*{needed}"):
        choose_layout(replace(LLAMA_8B, offload=offload), 1, 80 * GB, LayoutRequest(zero_stage=stage))


@pytest.mark.parametrize(
    ("batch", "workers", "largest", "tokens", "chosen"),
    [
        (96, 4, 100, 512, 24),  # one pass each
        (96, 4, 23, 512, 12),  # two even passes rather than 23 + 1
        (32, 3, 8, 512, 6),  # 6 micro-batches on 3 workers, the last one smaller
        (32, 3, 8, 2048, 6),  # a row more on one worker rather than 11 passes
        (128, 3, 16, 2048, 11),  # 12 micro-batches, 4 each
        (96, 5, 16, 512, 10),  # 10 micro-batches, 2 each
        (96, 1, 64, 512, 48),  # one worker: two passes either way, of less memory
        (32, 2, 3, 4096, 2),  # an even share for both rather than fewer passes
        (32, 2, 3, 128, 3),  # fewer passes rather than a device with nothing to do
        (1, 8, 1, 512, 1),
    ],
)
def test_micro_batch_divides_the_batch_over_the_workers(
    batch: int, workers: int, largest: int, tokens: int, chosen: int
) -> None:
    assert balanced_micro_batch_size(batch, workers, largest, tokens, zero_stage=1) == chosen


def test_passes_cost_more_if_weights_are_gathered_for_each() -> None:
    assert balanced_micro_batch_size(32, 2, 3, 1024, zero_stage=1) == 2  # 8 passes, an even share
    assert balanced_micro_batch_size(32, 2, 3, 1024, zero_stage=3) == 3  # 6 passes, a row more on one worker


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 64), st.integers(1, 8192), st.sampled_from([1, 3]))
def test_no_other_micro_batch_makes_a_shorter_step(
    batch: int, workers: int, largest: int, tokens: int, stage: Literal[1, 3]
) -> None:
    def step(size: int) -> int:
        samples, passes = [0] * workers, [0] * workers
        for number, start in enumerate(range(0, batch, size)):
            samples[number % workers] += min(size, batch - start)
            passes[number % workers] += 1
        return max(max(samples) * tokens, max(passes) * SATURATING_TOKENS) + max(passes) * PASS_OVERHEAD_TOKENS[stage]

    chosen = balanced_micro_batch_size(batch, workers, largest, tokens, stage)

    assert 1 <= chosen <= largest
    assert step(chosen) == min(step(size) for size in range(1, min(largest, -(-batch // workers)) + 1))


def test_a_second_commit_is_kept_in_memory_where_it_fits_beside_the_chosen_layout() -> None:
    setup = replace(setup_for("google-t5/t5-small", precision=FLOAT32), on_cpu=True)
    once = choose_layout(setup, 2, 40 * GB)
    auto = LayoutRequest(memory_copies="auto")
    enough = choose_layout(setup, 2, 40 * GB, auto)

    assert (enough.layout, enough.memory_copies) == (once.layout, 2)
    assert enough.memory.total_bytes - once.memory.total_bytes == once.memory.commit_bytes
    needed = math.ceil(enough.memory.total_bytes / setup.usable_fraction)
    layout = once.layout
    complete = LayoutRequest(layout.zero_stage, layout.micro_batch_size, layout.gradient_checkpointing, "auto")
    assert choose_layout(setup, 2, needed + 1, complete).memory_copies == 2
    assert choose_layout(setup, 2, needed - 100, complete).memory_copies == 1
    assert f"{enough.memory.total_bytes / GB:.1f} GB of 40.0 GB" in enough.reason


@pytest.mark.parametrize(("host_gigabytes", "copies"), [(None, 2), (200, 2), (110, 1)])
def test_commits_of_gpu_workers_fit_what_their_pods_request(host_gigabytes: int | None, copies: int) -> None:
    """Llama 8B on two workers: 48 GB for each commit, and 16 GB for the weights while they are loaded."""
    host = None if host_gigabytes is None else host_gigabytes * GB
    setup = replace(LLAMA_8B, host_memory_bytes=host)

    assert choose_layout(setup, 2, 141 * GB, LayoutRequest(memory_copies="auto")).memory_copies == copies


def test_two_commits_that_were_asked_for_count_in_the_layout_or_are_refused() -> None:
    setup = replace(setup_for("google-t5/t5-small", precision=FLOAT32), on_cpu=True)
    two = LayoutRequest(memory_copies=2)
    least = choose_layout(setup, 1, 40 * GB, LayoutRequest(micro_batch_size=1, gradient_checkpointing=True))
    budget = int(least.memory.total_bytes / setup.usable_fraction) + GB // 100

    assert choose_layout(setup, 1, 40 * GB, two).memory_copies == 2
    assert choose_layout(setup, 1, budget, LayoutRequest(memory_copies="auto")).memory_copies == 1
    with pytest.raises(JobError, match=r"checkpoint\.memoryCopies auto"):
        choose_layout(setup, 1, budget, two)


def test_without_copies_in_memory_there_is_still_one_to_write_from() -> None:
    none = choose_layout(T5_SMALL, 2, 80 * GB, LayoutRequest(memory_copies=0))

    assert none.memory_copies == 0
    assert none.memory.commit_bytes == choose_layout(T5_SMALL, 2, 80 * GB).memory.commit_bytes
