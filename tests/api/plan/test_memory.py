"""Memory of model states and activations, compared with published numbers and the papers' formulas."""

from dataclasses import replace
from typing import Any

import pytest

from spotune.job.training.hyperparameters import Optimizer
from spotune.plan.activations import Workload, activation_bytes, logits_bytes
from spotune.plan.config_reader import read_architecture
from spotune.plan.known_models import KNOWN_CONFIGS
from spotune.plan.memory import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GB,
    MOMENTS_8BIT_BYTES,
    Precision,
    ZeroStage,
    estimate_memory,
    model_states,
    precision_of,
)
from spotune.plan.parameters import TrainedParameters, count_parameters

GPT: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 1000,
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 8,
    "activation_function": "gelu",
    "resid_pdrop": 0.1,
}


def layers_bytes(config: dict[str, Any], **changes: Any) -> int:
    workload = Workload(micro_batch_size=3, sequence_length=128, **changes)
    return activation_bytes(read_architecture(config), workload).layers_bytes


def test_t5_11b_in_float32_takes_44_gb_of_weights_44_of_gradients_and_88_of_adam() -> None:
    states = model_states(11_000_000_000, FLOAT32, zero_stage=0, world_size=1)

    assert (states.weights_bytes, states.gradients_bytes, states.optimizer_bytes) == (44 * GB, 44 * GB, 88 * GB)
    exact = count_parameters(read_architecture(KNOWN_CONFIGS["google-t5/t5-11b"])).total
    assert model_states(exact, FLOAT32, 0, 1).device_bytes == pytest.approx((44 + 44 + 88) * GB, rel=0.03)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_7_5_billion_parameters_on_64_gpus_take_what_the_zero_paper_says(stage: ZeroStage, gigabytes: float) -> None:
    # Rajbhandari et al. 2020, figure 1: K = 12, 7.5 billion parameters, 64 workers.
    states = model_states(7_500_000_000, BFLOAT16, stage, world_size=64)

    assert round(states.device_bytes / GB, 1) == gigabytes


def test_1_billion_parameters_in_float32_with_activations_take_about_22_gb() -> None:
    llama_1b = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 17,
        "num_attention_heads": 32,
    }
    architecture = read_architecture(llama_1b)
    assert count_parameters(architecture).total == pytest.approx(1e9, rel=0.01)

    one_sequence = Workload(micro_batch_size=1, sequence_length=1024, bytes_per_element=4)
    memory = estimate_memory(architecture, one_sequence, FLOAT32, zero_stage=0, world_size=1)

    assert memory.states.device_bytes == pytest.approx(16 * GB, rel=0.01)
    assert memory.total_bytes == pytest.approx(22 * GB, rel=0.05)


def test_float32_with_a_sharded_optimizer_holds_a_second_copy_of_the_workers_part() -> None:
    whole = model_states(1000, FLOAT32, zero_stage=0, world_size=2)
    sharded = model_states(1000, FLOAT32, zero_stage=1, world_size=2)

    assert whole.optimizer_bytes == 8000
    assert sharded.optimizer_bytes == 12_000 / 2


def test_parts_that_do_not_divide_evenly_are_rounded_up() -> None:
    assert model_states(7, BFLOAT16, 3, world_size=4).weights_bytes == 4


def test_quantised_weights_are_half_a_byte_and_their_scales() -> None:
    states = model_states(0, BFLOAT16, 2, world_size=2, frozen=1000 + 6400, quantised=6400)

    assert states.weights_bytes == 2 * 1000 + 6400 / 2 + 4 * 100
    with pytest.raises(ValueError, match="cannot shard"):
        model_states(0, BFLOAT16, 3, world_size=2, frozen=6400, quantised=6400)


@pytest.mark.parametrize("stage", [1, 2])
def test_states_in_host_memory_that_the_device_updates_leave_gradients_there(stage: ZeroStage) -> None:
    states = model_states(1000, BFLOAT16, stage, world_size=2, offload="optimizer")

    assert states.optimizer_bytes == 0
    assert states.host_bytes == 12 * 1000 / 2
    assert states.weights_bytes == 2000
    assert states.gradients_bytes == (2000 if stage == 1 else 1000)


@pytest.mark.parametrize(("precision", "stage"), [(FLOAT16, 1), (FLOAT16, 2), (BFLOAT16, 3)])
def test_offloaded_optimizer_states_are_in_host_memory(precision: Precision, stage: ZeroStage) -> None:
    # ZeRO-Offload: 16 bytes per parameter on the host: master, two moments and the gradient in float32.
    states = model_states(1000, precision, stage, world_size=2, offload="optimizer")

    assert states.optimizer_bytes == 0
    assert states.host_bytes == 16 * 1000 / 2
    assert states.weights_bytes == (1000 if stage == 3 else 2000)
    assert states.gradients_bytes == (2000 if stage == 1 else 0)


def test_offloaded_parameters_leave_no_states_on_the_device() -> None:
    states = model_states(1000, BFLOAT16, 3, world_size=2, offload="parameters")

    assert states.device_bytes == 0
    assert states.host_bytes == 18 * 1000 / 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [FLOAT32, FLOAT16, BFLOAT16])
def test_each_worker_copies_its_shard_of_a_commit_to_host_memory(precision: Precision, stage: ZeroStage) -> None:
    t5 = read_architecture(KNOWN_CONFIGS["google-t5/t5-small"])
    parameters = count_parameters(t5).total
    memory = estimate_memory(t5, Workload(1, 128, 32), precision, stage, world_size=7)

    assert memory.host_bytes == memory.commit_bytes == -(-12 * parameters // 7)


def test_on_cpu_workers_the_copy_is_part_of_their_memory() -> None:
    t5 = read_architecture(KNOWN_CONFIGS["google-t5/t5-small"])
    on_gpu, on_cpu = (
        estimate_memory(t5, Workload(1, 128, 32), FLOAT32, 1, world_size=2, on_cpu=is_cpu) for is_cpu in (False, True)
    )

    assert on_cpu.total_bytes - on_gpu.total_bytes == on_cpu.commit_bytes
    assert on_cpu.host_bytes == 0


def test_offload_that_a_stage_does_not_support_is_rejected() -> None:
    with pytest.raises(ValueError, match="stage 1 or more"):
        model_states(1000, BFLOAT16, 0, 1, "optimizer")
    with pytest.raises(ValueError, match="stage 3"):
        model_states(1000, BFLOAT16, 2, 1, "parameters")


def test_precision_follows_the_dtype() -> None:
    assert precision_of("float32") is FLOAT32
    assert precision_of("float16") is FLOAT16
    assert precision_of("bfloat16") is BFLOAT16


@pytest.mark.parametrize(("dtype", "stage", "expected"), [("float32", 0, 2), ("float32", 1, 6), ("bfloat16", 2, 6)])
def test_8bit_moments_are_a_byte_each_and_their_scales(dtype: str, stage: ZeroStage, expected: int) -> None:
    states = model_states(256_000, precision_of(dtype, "adamw8bit"), stage, world_size=1)

    assert states.optimizer_bytes == expected * 256_000 + 2 * 4 * 1000


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_worker_holds_gradients_in_fixed_point_and_those_of_a_micro_batch(dtype: str, stage: ZeroStage) -> None:
    usual = precision_of(dtype)
    states = model_states(1000, precision_of(dtype, fixed_point=True), stage, world_size=4)

    assert states.gradients_bytes == (8 + usual.gradient_bytes) * 1000
    assert states.optimizer_bytes == model_states(1000, usual, stage, world_size=4).optimizer_bytes


MATRICES = TrainedParameters(1000, hidden_matrices=600, factored=50)


@pytest.mark.parametrize(
    ("optimizer", "ema", "optimizer_bytes", "checkpoint_bytes"),
    [
        ("schedule_free_adamw", False, 12, 12),
        ("muon", False, 4 + 8 - 4 * 0.6, 4 + 8 - 4 * 0.6),
        ("adafactor", False, 4 + 4 * 0.05, 4 + 4 * 0.05),
        ("adamw", True, 16, 16),
        ("adamw8bit", True, 4 + MOMENTS_8BIT_BYTES + 4, 16),
    ],
)
def test_states_of_each_optimizer_and_of_the_moving_average_are_counted(
    optimizer: Optimizer, ema: bool, optimizer_bytes: float, checkpoint_bytes: float
) -> None:
    in_bfloat16, in_float32 = (precision_of(dtype, optimizer, MATRICES, ema=ema) for dtype in ("bfloat16", "float32"))

    assert in_bfloat16.optimizer_bytes == pytest.approx(optimizer_bytes)
    assert in_float32.optimizer_bytes == pytest.approx(optimizer_bytes - 4)
    assert in_bfloat16.checkpoint_bytes == in_float32.checkpoint_bytes == pytest.approx(checkpoint_bytes)


def test_gpt_layer_keeps_the_papers_34_bytes_and_the_second_copy_of_the_attention_output() -> None:
    # Korthikanti et al. 2022: 34 s b h without scores; PyTorch's kernel leaves its output in another layout: + 2 s b h.
    growth = layers_bytes(GPT | {"n_layer": 5}) - layers_bytes(GPT)

    assert growth == (34 + 2) * 128 * 3 * 256


def test_kept_attention_scores_grow_with_the_square_of_the_length() -> None:
    # Equation 1: 5 a s^2 b with a softmax in 16 bit; transformers computes it in float32 and keeps a copy: 9 a s^2 b.
    scores = layers_bytes(GPT, fused_attention=False) - layers_bytes(GPT)

    assert scores == 4 * 9 * 8 * 128**2 * 3


def test_bloom_always_keeps_its_attention_scores() -> None:
    bloom = dict(KNOWN_CONFIGS["bigscience/bloom-560m"])

    assert layers_bytes(bloom, fused_attention=True) == layers_bytes(bloom, fused_attention=False)


def test_softcapped_attention_scores_are_kept_with_the_cap_output() -> None:
    gemma_2: dict[str, Any] = {**KNOWN_CONFIGS["google/gemma-2-2b"], "final_logit_softcapping": None}
    uncapped = layers_bytes(gemma_2 | {"attn_logit_softcapping": None})

    assert layers_bytes(gemma_2) - uncapped == 26 * (4 + 2 + 2) * 8 * 128**2 * 3


def test_checkpointing_keeps_the_input_of_each_layer() -> None:
    four = layers_bytes(GPT, gradient_checkpointing=True)
    five = layers_bytes(GPT | {"n_layer": 5}, gradient_checkpointing=True)

    assert five - four == 2 * 128 * 3 * 256


def test_checkpointing_holds_one_layer_or_the_logits_whichever_is_larger() -> None:
    workload = Workload(micro_batch_size=3, sequence_length=128, gradient_checkpointing=True)
    small_vocabulary = read_architecture(GPT | {"vocab_size": 10})
    large_vocabulary = read_architecture(GPT | {"vocab_size": 100_000})

    assert activation_bytes(small_vocabulary, workload).working_bytes == 36 * 128 * 3 * 256
    assert activation_bytes(large_vocabulary, workload).working_bytes == logits_bytes(large_vocabulary, workload)


def test_encoder_and_decoder_have_separate_lengths() -> None:
    t5 = read_architecture(KNOWN_CONFIGS["google-t5/t5-small"])
    long_source = activation_bytes(t5, Workload(4, sequence_length=512, target_length=64))
    long_target = activation_bytes(t5, Workload(4, sequence_length=64, target_length=512))

    assert long_target.working_bytes == 8 * long_source.working_bytes
    assert long_target.layers_bytes > long_source.layers_bytes


def test_softcapped_logits_add_the_cap_output_to_the_loss_memory() -> None:
    workload = Workload(micro_batch_size=1, sequence_length=100)
    capped = read_architecture(KNOWN_CONFIGS["google/gemma-2-2b"])
    uncapped = read_architecture({**KNOWN_CONFIGS["google/gemma-2-2b"], "final_logit_softcapping": None})

    assert logits_bytes(capped, workload) - logits_bytes(uncapped, workload) == 2 * 100 * 256_000


def test_optimizer_step_and_activations_are_not_held_at_the_same_time() -> None:
    t5 = read_architecture(KNOWN_CONFIGS["google-t5/t5-small"])
    tiny, large = (
        estimate_memory(t5, Workload(size, 128, 32), FLOAT16, 2, world_size=1, runtime_bytes=0) for size in (1, 64)
    )

    assert tiny.activations.total_bytes < tiny.step_bytes < large.activations.total_bytes
    assert tiny.total_bytes == tiny.states.device_bytes + tiny.step_bytes
    assert large.total_bytes == large.states.device_bytes + large.activations.total_bytes


def test_gradients_are_reduced_once_the_logits_are_gone() -> None:
    llama = read_architecture(KNOWN_CONFIGS["meta-llama/llama-2-7b-hf"])
    short, long = (
        estimate_memory(llama, Workload(1, length), BFLOAT16, 1, world_size=2, runtime_bytes=0)
        for length in (128, 32_768)
    )

    assert short.activations.working_bytes < short.reduction_bytes < long.activations.working_bytes
    assert short.total_bytes == short.states.device_bytes + short.activations.layers_bytes + short.reduction_bytes
    assert long.total_bytes == long.states.device_bytes + long.activations.total_bytes


@pytest.mark.parametrize(
    ("stage", "world_size", "expected"),
    [
        (0, 1, 0),
        (1, 1, 0),
        (1, 4, 2_000_000_000 + 3_369_207_808),
        (2, 1, 2_000_000_000),
        (2, 4, 2_000_000_000),
        (3, 4, 0),
    ],
)
def test_reduction_needs_two_buckets_and_at_stage_1_also_the_workers_shard(
    stage: ZeroStage, world_size: int, expected: int
) -> None:
    llama = read_architecture(KNOWN_CONFIGS["meta-llama/llama-2-7b-hf"])
    memory = estimate_memory(llama, Workload(1, 128), BFLOAT16, stage, world_size)

    assert memory.reduction_bytes == expected


def test_a_single_worker_reduces_gradients_only_with_deepspeeds_own_step() -> None:
    t5 = read_architecture(KNOWN_CONFIGS["google-t5/t5-small"])
    parameters = count_parameters(t5).total
    found = {
        name: estimate_memory(t5, Workload(1, 128, 32), precision, 1, world_size=1).reduction_bytes / parameters
        for name, precision in (("bfloat16", BFLOAT16), ("float16", FLOAT16), ("float32", FLOAT32))
    }

    assert found == {"bfloat16": 0, "float16": 3 * 2, "float32": 3 * 4}


@pytest.mark.parametrize(
    ("precision", "stage", "expected"),
    [
        (BFLOAT16, 1, 4 << 26),
        (BFLOAT16, 2, 4 << 26),
        (FLOAT16, 1, 6 * 842_301_952),
        (BFLOAT16, 3, 4 << 26),
        (FLOAT16, 3, 4 * 842_301_952),
    ],
)
def test_fused_step_holds_few_gradients_in_float32(precision: Precision, stage: ZeroStage, expected: int) -> None:
    llama = read_architecture(KNOWN_CONFIGS["meta-llama/llama-2-7b-hf"])

    assert estimate_memory(llama, Workload(1, 128), precision, stage, world_size=8).step_bytes == expected


def test_whole_gradients_are_kept_in_addition_to_the_workers_shard() -> None:
    parts = model_states(1000, BFLOAT16, 3, world_size=4)
    whole = model_states(1000, BFLOAT16, 3, world_size=4, whole_gradients=True)

    assert replace(parts, gradients_bytes=parts.gradients_bytes + 2000) == whole


def test_buffers_are_stage_3s_bucket_and_gathered_weights() -> None:
    llama = read_architecture(KNOWN_CONFIGS["meta-llama/llama-2-7b-hf"])
    stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    memory = [estimate_memory(llama, Workload(1, 128), BFLOAT16, stage, world_size=8) for stage in stages]

    outside_layers = 2 * 32_000 * 4096
    assert [each.buffers_bytes for each in memory] == [0, 0, 0, 1 * GB + 21 * GB // 10 + 2 * outside_layers]


def test_gathered_layers_count_and_whole_gradients_need_no_bucket() -> None:
    llama = read_architecture(KNOWN_CONFIGS["meta-llama/llama-2-7b-hf"])
    outside_layers = 2 * 32_000 * 4096
    arguments: Any = (llama, Workload(1, 128), BFLOAT16, 3, 8)

    assert estimate_memory(*arguments, gathered_layers=2).buffers_bytes == (
        1 * GB + 21 * GB // 10 + 2 * (outside_layers + 2 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096))
    )
    assert estimate_memory(*arguments, gathered_layers=32).buffers_bytes == 1 * GB + 2 * 6_738_415_616
    assert estimate_memory(*arguments, whole_gradients=True).buffers_bytes == 21 * GB // 10 + 2 * outside_layers
    assert estimate_memory(*arguments, offload="parameters").buffers_bytes == 1 * GB + 21 * GB // 10
