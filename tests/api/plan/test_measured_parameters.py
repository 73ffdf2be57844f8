"""The plan's parameter counts equal those of models that transformers creates from the same configuration."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from spotune.plan.config_reader import ENCODER_MODEL_TYPES, SUPPORTED_MODEL_TYPES, read_architecture
from spotune.plan.parameters import count_parameters, trained_parameters
from spotune_trainer.engine.optimizers.adafactor import second_moment_shapes
from spotune_trainer.engine.optimizers.build import hidden_matrices

LLAMA_SIZE = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
T5_SIZE = {"vocab_size": 300, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 3, "num_heads": 6}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("t5", T5_SIZE),
    ("t5", T5_SIZE | {"num_decoder_layers": 1, "relative_attention_num_buckets": 16}),
    ("t5", T5_SIZE | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("t5", T5_SIZE | {"feed_forward_proj": "gated-silu"}),
    ("mt5", T5_SIZE),
    (
        "bart",
        {
            "vocab_size": 300,
            "d_model": 48,
            "encoder_layers": 3,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 6,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 80,
            "max_position_embeddings": 40,
            "decoder_start_token_id": 2,
        },
    ),
    ("gpt2", {"vocab_size": 300, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 40}),
    (
        "gpt2",
        {"vocab_size": 300, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 100, "tie_word_embeddings": False},
    ),
    ("llama", LLAMA_SIZE),
    ("llama", LLAMA_SIZE | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("llama", LLAMA_SIZE | {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    ("mistral", LLAMA_SIZE | {"num_key_value_heads": 3}),
    ("mistral", LLAMA_SIZE | {"num_attention_heads": 8}),
    ("qwen2", LLAMA_SIZE | {"num_key_value_heads": 2}),
    ("qwen2", LLAMA_SIZE | {"num_key_value_heads": None}),
    ("qwen2", LLAMA_SIZE),
    ("qwen2", LLAMA_SIZE | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("qwen3", LLAMA_SIZE),
    ("qwen3", LLAMA_SIZE | {"num_key_value_heads": 2}),
    ("qwen3", LLAMA_SIZE | {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}),
    ("gemma", LLAMA_SIZE),
    ("gemma", LLAMA_SIZE | {"num_key_value_heads": 1}),
    ("gemma", LLAMA_SIZE | {"num_key_value_heads": 6, "head_dim": 16, "tie_word_embeddings": False}),
    ("gemma2", LLAMA_SIZE | {"num_attention_heads": 8, "head_dim": 16}),
    ("gemma3_text", LLAMA_SIZE | {"num_key_value_heads": 2, "head_dim": 16}),
    ("phi3", LLAMA_SIZE | {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}),
    ("bloom", {"vocab_size": 300, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
    ("gpt_neox", LLAMA_SIZE),
    ("gpt_neox", LLAMA_SIZE | {"attention_bias": False, "use_parallel_residual": False, "tie_word_embeddings": True}),
]

ENCODERS: list[tuple[str, dict[str, Any]]] = [
    ("bert", LLAMA_SIZE),
    ("bert", LLAMA_SIZE | {"type_vocab_size": 1, "max_position_embeddings": 40}),
    ("roberta", LLAMA_SIZE | {"type_vocab_size": 1, "max_position_embeddings": 42}),
    ("xlm-roberta", LLAMA_SIZE),
    ("distilbert", {"vocab_size": 300, "dim": 48, "hidden_dim": 112, "n_layers": 3, "n_heads": 6}),
]


def model_on_meta_device(config: Any) -> Any:
    auto_model: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_model.from_config(config)
    model.tie_weights()
    return model


@pytest.mark.parametrize(("model_type", "values"), VARIANTS)
def test_count_is_exact(model_type: str, values: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[model_type](**values)
    expected = model_on_meta_device(config).num_parameters()

    as_published = {"model_type": model_type, **values}
    as_transformers_reads_it = config.to_dict()

    for written in (as_published, as_transformers_reads_it):
        assert count_parameters(read_architecture(written), pretrained=False).total == expected


@pytest.mark.parametrize(("model_type", "values"), VARIANTS)
def test_matrices_that_muon_updates_are_counted_exactly(model_type: str, values: dict[str, Any]) -> None:
    model = model_on_meta_device(CONFIG_MAPPING[model_type](**values))
    planned = trained_parameters(read_architecture({"model_type": model_type, **values}), pretrained=False)
    assert planned.hidden_matrices == sum(model.get_parameter(name).numel() for name in hidden_matrices(model))


@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize(("model_type", "values"), [*ENCODERS, ("gpt2", VARIANTS[6][1]), ("llama", LLAMA_SIZE)])
def test_muon_keeps_two_states_for_the_head_of_a_classifier(
    model_type: str, values: dict[str, Any], of_tokens: bool
) -> None:
    config = CONFIG_MAPPING[model_type](**values)
    config.num_labels = 5
    auto_model: Any = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = auto_model.from_config(config)
    architecture = read_architecture({"model_type": model_type, **values})
    planned = trained_parameters(replace(architecture, head_outputs=5, head_of_tokens=of_tokens))
    assert planned.hidden_matrices == sum(model.get_parameter(name).numel() for name in hidden_matrices(model))
    assert planned.count == model.num_parameters()


@pytest.mark.parametrize(("model_type", "values"), VARIANTS)
def test_states_of_adafactor_are_counted(model_type: str, values: dict[str, Any]) -> None:
    model = model_on_meta_device(CONFIG_MAPPING[model_type](**values))
    shapes = [second_moment_shapes(tuple(each.shape)).values() for each in model.parameters()]
    states = sum(math.prod(shape) for of_parameter in shapes for shape in of_parameter)
    planned = trained_parameters(read_architecture({"model_type": model_type, **values}), pretrained=False)
    if model_type in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"):
        assert planned.factored == states
    else:  # the plan counts fused matrices one by one, and positions as vectors
        assert states <= planned.factored < planned.count / 2


@pytest.mark.parametrize(("model_type", "values"), [each for each in VARIANTS if each[0] not in ("t5", "mt5", "bart")])
def test_count_of_a_reward_model_is_exact(model_type: str, values: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[model_type](**values)
    config.num_labels = 1
    auto_model: Any = AutoModelForSequenceClassification
    with torch.device("meta"):
        expected = auto_model.from_config(config).num_parameters()
    architecture = replace(read_architecture({"model_type": model_type, **values}), head_outputs=1)
    assert count_parameters(architecture).total == expected


@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize(("model_type", "values"), [*ENCODERS, ("gpt2", VARIANTS[6][1]), ("llama", LLAMA_SIZE)])
def test_count_of_a_classifier_is_exact(model_type: str, values: dict[str, Any], of_tokens: bool) -> None:
    config = CONFIG_MAPPING[model_type](**values)
    config.num_labels = 5
    auto_model: Any = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    with torch.device("meta"):
        expected = auto_model.from_config(config).num_parameters()
    for written in ({"model_type": model_type, **values}, config.to_dict()):
        architecture = replace(read_architecture(written), head_outputs=5, head_of_tokens=of_tokens)
        assert count_parameters(architecture).total == expected


@pytest.mark.parametrize(
    ("model_type", "values"), [*ENCODERS, *(each for each in VARIANTS if each[0] not in ("t5", "mt5", "bart"))]
)
def test_count_of_a_model_with_embeddings_is_exact(model_type: str, values: dict[str, Any]) -> None:
    with torch.device("meta"):
        built = AutoModel.from_config(CONFIG_MAPPING[model_type](**values))
    if hasattr(built, "pooler"):
        built.pooler = None  # as the trainer removes it
    architecture = replace(read_architecture({"model_type": model_type, **values}), without_head=True)
    assert count_parameters(architecture).total == built.num_parameters()


def test_every_supported_architecture_is_compared() -> None:
    assert {model_type for model_type, _ in VARIANTS} == set(SUPPORTED_MODEL_TYPES)
    assert {model_type for model_type, _ in ENCODERS} == set(ENCODER_MODEL_TYPES)
