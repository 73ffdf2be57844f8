"""Resolving the `auto` values of a job's execution section."""

from typing import Any

import pytest

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune.plan import ExecutionPlan, resolve_execution
from spotune.plan.activations import Workload, logits_bytes
from spotune.plan.config_reader import read_architecture
from spotune.plan.execution import layout_request, resolve_minimum, training_setup
from spotune.plan.known_models import KNOWN_CONFIGS, known_config
from spotune.plan.layout import ModelTooLargeError
from spotune.plan.memory import BFLOAT16, CPU_RUNTIME_BYTES, FLOAT32, GB
from spotune.plan.parameters import count_lora_parameters
from spotune.plan.training_setup import Layout
from tests.api.support.job_files import a_job

T5_SMALL = KNOWN_CONFIGS["google-t5/t5-small"]
TINY = {**T5_SMALL, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 500}


def t5_job(**sections: Any) -> FinetuneJob:
    defaults = {
        "model": {"source": "model", "task": "seq2seq", "dtype": "float32"},
        "dataset": {"train": {"source": "shards"}, "maxLength": 128, "maxCompletionLength": 64},
        "training": {"epochs": 1, "globalBatchSize": 32},
    }
    return a_job(**defaults | sections)


def test_tiny_model_on_cpu_workers_gets_plain_values() -> None:
    plan = resolve_execution(TINY, t5_job(workers={"count": 2, "gpus": 0}), 2, 4 * GB)

    assert (plan.zero_stage, plan.micro_batch_size, plan.gradient_checkpointing) == (0, 16, False)
    assert plan.reason.startswith("ZeRO stage 0 (the lowest that fits), micro-batch 16")


def test_cpu_workers_plan_with_a_fraction_of_the_machines_memory() -> None:
    job = t5_job(workers={"gpus": 0}, training={"epochs": 1, "globalBatchSize": 4096})
    plan = resolve_execution(TINY, job, 1, 4 * GB)

    assert plan.memory is not None
    assert plan.memory.total_bytes <= 2.8 * GB


def test_explicit_values_are_respected() -> None:
    execution = {"zeroStage": 2, "microBatchSize": 3, "gradientCheckpointing": True}
    plan = resolve_execution(TINY, t5_job(execution=execution), 2, 80 * GB)

    assert (plan.zero_stage, plan.micro_batch_size, plan.gradient_checkpointing) == (2, 3, True)
    assert plan.reason == "as set in execution"
    assert plan.memory is not None


def test_a_reproducible_job_is_planned_with_its_gradients_in_fixed_point() -> None:
    execution: dict[str, Any] = {"zeroStage": 1, "microBatchSize": 4, "gradientCheckpointing": False}
    usual, reproducible = (
        resolve_execution(TINY, t5_job(execution=execution | {"reproducible": setting}), 2, 80 * GB).memory
        for setting in ("none", "worldSize")
    )

    assert usual is not None
    assert reproducible is not None
    assert reproducible.states.gradients_bytes == 3 * usual.states.gradients_bytes


def test_unknown_model_needs_no_plan_if_the_layout_is_complete() -> None:
    execution = {"zeroStage": 2, "microBatchSize": 3, "gradientCheckpointing": False}

    plan = resolve_execution({"model_type": "brand_new"}, t5_job(execution=execution), 2, 80 * GB)

    assert plan == ExecutionPlan(2, 3, gradient_checkpointing=False, compile=False, reason="as set in execution")


def test_unknown_model_with_auto_values_is_rejected() -> None:
    with pytest.raises(JobError, match=r"'brand_new'.*set execution\.microBatchSize, execution\.zeroStage"):
        resolve_execution({"model_type": "brand_new"}, t5_job(execution={"microBatchSize": 3}), 2, 80 * GB)


def test_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(JobError, match="does not fit"):
        resolve_execution(KNOWN_CONFIGS["google-t5/t5-11b"], t5_job(), 1, 80 * GB)


def too_large_for_one(**workers: Any) -> FinetuneJob:
    """A job of T5-3B in fp32: its states need 57 GB, and more than one device of 40 GB."""
    return t5_job(workers={"count": 6, "gpus": 1} | workers)


T5_3B = KNOWN_CONFIGS["google-t5/t5-3b"]


def test_auto_is_the_smallest_number_of_pods_on_which_the_model_fits() -> None:
    found = resolve_minimum(T5_3B, too_large_for_one(), 40 * GB)
    assert found.world_size > 1
    assert found.execution == resolve_execution(T5_3B, too_large_for_one(), found.world_size, 40 * GB)
    with pytest.raises(JobError, match="does not fit on"):
        resolve_execution(T5_3B, too_large_for_one(), found.world_size - 1, 40 * GB)
    assert resolve_minimum(T5_3B, too_large_for_one(), 800 * GB).world_size == 1


def test_auto_counts_whole_pods() -> None:
    assert resolve_minimum(T5_3B, too_large_for_one(count=3, gpus=2), 40 * GB).world_size in (2, 4)
    assert resolve_minimum(T5_3B, too_large_for_one(count=3, gpus=8), 40 * GB).world_size == 8


def test_a_given_minimum_is_kept_or_refused() -> None:
    assert resolve_minimum(T5_3B, too_large_for_one(min=5), 40 * GB).world_size == 5
    with pytest.raises(JobError, match="does not fit on 1 worker"):
        resolve_minimum(T5_3B, too_large_for_one(min=1), 40 * GB)


def test_auto_refuses_a_model_that_does_not_fit_on_all_pods() -> None:
    with pytest.raises(JobError, match="does not fit on 6 workers"):
        resolve_minimum(T5_3B, too_large_for_one(), 4 * GB)


def test_auto_with_a_whole_layout_is_the_smallest_number_that_the_estimate_allows() -> None:
    layout = {"zeroStage": 3, "microBatchSize": 1, "gradientCheckpointing": True}
    job = t5_job(workers={"count": 6, "gpus": 1}, execution=layout)
    found = resolve_minimum(T5_3B, job, 40 * GB)
    assert found.execution.fits
    assert not resolve_execution(T5_3B, job, found.world_size - 1, 40 * GB).fits


def test_a_second_commit_is_kept_from_the_number_of_workers_on_which_it_fits() -> None:
    execution = {"zeroStage": 1, "microBatchSize": 1, "gradientCheckpointing": True}
    job = t5_job(workers={"count": 4, "min": 1, "gpus": 0}, execution=execution)
    found = [resolve_minimum(T5_SMALL, job, memory).second_copy_from for memory in range(GB, 8 * GB, GB // 20)]

    assert list(dict.fromkeys(found)) == [None, 4, 3, 2, 1], "the more memory, the fewer workers"


@pytest.mark.parametrize(
    ("copies", "expected"),
    [("auto", [None, 4, 3, 2]), (1, [None, 4, 3, 2]), (0, [None])],
)
def test_a_commit_of_another_node_is_kept_from_the_number_of_workers_on_which_it_fits(
    copies: str | int, expected: list[int | None]
) -> None:
    """One worker is one node, which has no other."""
    execution = {"zeroStage": 1, "microBatchSize": 1, "gradientCheckpointing": True}
    workers = {"count": 4, "min": 1, "gpus": 0}
    job = t5_job(workers=workers, execution=execution, checkpoint={"memoryCopies": copies})
    found = [resolve_minimum(T5_SMALL, job, memory) for memory in range(GB, 8 * GB, GB // 20)]

    assert list(dict.fromkeys(plan.peer_copy_from for plan in found)) == expected
    if copies == "auto":
        beside_two = [plan.second_copy_from for plan in found if plan.peer_copy_from == 4]
        assert set(beside_two) < {1, 2, 3, 4}, "the node's own commits come first"


def test_workers_of_one_pod_have_no_other_node() -> None:
    pods = [t5_job(workers={"count": count, "min": 1, "gpus": 4}) for count in (1, 2)]
    assert [layout_request(job, 4).peer_copy for job in pods] == [False, False]
    assert layout_request(pods[1], 8).peer_copy == "auto"


def test_pods_with_gpus_share_the_memory_that_they_request() -> None:
    workers = {"count": 2, "gpus": 4, "resources": {"requests": {"memory": "64Gi"}, "limits": {"memory": "80Gi"}}}
    setup = training_setup(read_architecture(T5_SMALL), t5_job(workers=workers))

    assert setup.host_memory_bytes == 16 * 2**30
    assert training_setup(read_architecture(T5_SMALL), t5_job()).host_memory_bytes is None


def test_setup_reads_lengths_precision_and_device_from_the_job() -> None:
    architecture = read_architecture(T5_SMALL)
    on_gpu = training_setup(architecture, t5_job())
    on_cpu = training_setup(architecture, t5_job(workers={"gpus": 0}))

    assert (on_gpu.sequence_length, on_gpu.target_length, on_gpu.global_batch_size) == (128, 64, 32)
    assert on_gpu.precision is FLOAT32
    assert on_gpu.fused_attention
    assert not on_cpu.fused_attention
    assert on_cpu.runtime_bytes == CPU_RUNTIME_BYTES


@pytest.mark.parametrize("packing", [False, True])
def test_a_row_of_a_preference_objective_is_a_pair_of_sequences(packing: bool) -> None:
    """Packed rows are as long as the longest pair, so they need no other memory."""
    dataset = {"train": {"source": "shards"}, "maxLength": 128, "packing": packing}
    training = {"epochs": 1, "objective": "dpo"}
    job = a_job(model={"source": "model"}, dataset=dataset, training=training, execution={"compile": True})
    setup = training_setup(read_architecture(KNOWN_CONFIGS["openai-community/gpt2"]), job)

    assert setup.sequence_length == 256
    assert not setup.chunked_loss


def test_a_reward_model_has_no_projection_to_the_vocabulary() -> None:
    dataset = {"train": {"source": "shards"}, "maxLength": 128}
    language, reward = (
        training_setup(
            read_architecture(known_config("hf://HuggingFaceH4/mistral-7b-sft-beta") or {}),
            a_job(model={"source": "model"}, dataset=dataset, training={"epochs": 1, "objective": objective}),
        )
        for objective in ("simpo", "reward")
    )

    assert reward.sequence_length == language.sequence_length
    assert language.trained.count - reward.trained.count == 32_000 * 4096 - 4096
    of_language, of_reward = (logits_bytes(setup.architecture, Workload(1, 256)) for setup in (language, reward))
    assert of_reward == 2 * 256 < of_language / 1000


@pytest.mark.parametrize(("objective", "outputs_of"), [("classification", "texts"), ("tokenClassification", "words")])
def test_a_classifier_has_outputs_for_its_labels(objective: str, outputs_of: str) -> None:
    dataset = {"train": {"source": "shards"}, "maxLength": 128, "labels": ["O", "B-X", "I-X"]}
    training = {"epochs": 1, "objective": objective}
    job = a_job(model={"source": "model"}, adapter={"lora": {"r": 8}}, dataset=dataset, training=training)
    config = {"model_type": "bert"}
    setup = training_setup(read_architecture(config), job)

    assert setup.sequence_length == 128
    assert setup.architecture.head_of_tokens == (outputs_of == "words")
    head = 3 * 769 + (768 * 769 if outputs_of == "texts" else 0)
    assert setup.trained.count == count_lora_parameters(setup.architecture, 8) + head
    assert resolve_execution(config, job, 1, 8 << 30).memory is not None


def test_target_length_defaults_to_the_source_length() -> None:
    job = t5_job(dataset={"train": {"source": "shards"}, "maxLength": 128})

    assert training_setup(read_architecture(T5_SMALL), job).target_length == 128


def test_causal_models_have_no_target_and_sixteen_bits_by_default() -> None:
    job = a_job(model={"source": "model"}, execution={"attention": "eager", "offload": "optimizer"})
    setup = training_setup(read_architecture(KNOWN_CONFIGS["openai-community/gpt2"]), job)

    assert setup.target_length == 0
    assert setup.precision is BFLOAT16
    assert not setup.fused_attention
    assert setup.offload == "optimizer"


def test_randomly_initialised_model_has_tied_embeddings() -> None:
    scratch = t5_job(model={"source": "model", "task": "seq2seq", "initialise": "random"})

    assert not training_setup(read_architecture(T5_SMALL), scratch).pretrained


@pytest.mark.parametrize(
    ("execution", "gpus", "packing", "compiled"),
    [
        ({}, 1, True, True),
        ({}, 1, False, False),
        ({}, 0, True, False),
        ({"compile": True}, 0, False, True),
        ({"compile": False}, 1, True, False),
        ({"precision": "fp8"}, 1, False, True),
        ({"precision": "fp8"}, 0, False, False),
    ],
)
def test_auto_compiles_layers_on_gpus_with_packed_rows(
    execution: dict[str, Any], gpus: int, packing: bool, compiled: bool
) -> None:
    dataset = {"train": {"source": "shards"}, "packing": packing}
    asked = {"zeroStage": 2, "microBatchSize": 3, "gradientCheckpointing": False, **execution}
    job = a_job(model={"source": "m", "task": "causal"}, dataset=dataset, workers={"gpus": gpus}, execution=asked)
    plan = resolve_execution({"model_type": "unheard-of"}, job, 1, 80 * GB)
    assert plan.compile is compiled
    assert plan.reason.endswith("layers compiled") is compiled


def test_fp8_with_an_adapter_is_planned_without_stage_3_and_saves_no_less() -> None:
    dataset = {"train": {"source": "shards"}, "packing": True, "maxLength": 2048}
    found = {}
    for adapter in (None, {"lora": {"r": 16}}):
        for precision in ("auto", "fp8"):
            job = a_job(
                model={"source": "m", "task": "causal"},
                dataset=dataset,
                **({"adapter": adapter} if adapter else {}),
                workers={"gpus": 1},
                execution={"precision": precision, "compile": True},
            )
            config = KNOWN_CONFIGS["meta-llama/llama-3.2-1b"]
            setup = training_setup(read_architecture(config), job)
            found[precision, adapter is None] = setup.memory(1, Layout(1, 8, False)).activations.layers_bytes
            if adapter and precision == "fp8":
                with pytest.raises(ModelTooLargeError, match=r"execution\.precision auto \(so that stage 3"):
                    resolve_execution(config, job, 1, 4 * GB)
    made_again = 16 * 8 * 2048 * (8192 + 2 * 2048) * 2
    assert found["auto", True] - found["fp8", True] == made_again, "inputs behind the norms and of the last matrix"
    assert found["auto", False] == found["fp8", False], "an adapter needs it in bfloat16"


@pytest.mark.parametrize(
    ("model", "dtype", "in_chunks"),
    [
        ("meta-llama/llama-3.2-1b", "bfloat16", True),
        ("meta-llama/llama-3.2-1b", "float16", False),
        ("google/gemma-2-2b", "bfloat16", False),
    ],
)
def test_all_logits_are_counted_without_a_chunked_loss(model: str, dtype: str, in_chunks: bool) -> None:
    dataset = {"train": {"source": "shards"}, "packing": True, "maxLength": 2048}
    job = a_job(model={"source": "m", "task": "causal", "dtype": dtype}, dataset=dataset, workers={"gpus": 1})
    setup = training_setup(read_architecture(KNOWN_CONFIGS[model]), job)
    logits = setup.memory(1, Layout(1, 8, gradient_checkpointing=False)).activations.working_bytes
    all_of_them = 8 * 2048 * setup.architecture.vocabulary_size * 12
    assert setup.compiled
    assert (logits < all_of_them / 2) is in_chunks
    assert in_chunks or logits >= all_of_them
