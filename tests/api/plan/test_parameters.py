"""Parameter counts from a config.json: published models, defaults and unsupported models."""

from typing import Any

import pytest

from spotune.errors import JobError
from spotune.plan.config_reader import SUPPORTED_MODEL_TYPES, read_architecture
from spotune.plan.known_models import KNOWN_CONFIGS, known_config
from spotune.plan.parameters import count_parameters

PUBLISHED_TOTALS = {
    "google-t5/t5-small": 60_506_624,
    "google-t5/t5-base": 222_903_552,
    "google-t5/t5-large": 737_668_096,
    "google-t5/t5-3b": 2_851_598_336,
    "google-t5/t5-11b": 11_307_321_344,
    "google/t5-v1_1-small": 76_961_152,
    "google/flan-t5-base": 247_577_856,
    "google/flan-t5-large": 783_150_080,
    "google/flan-t5-xl": 2_849_757_184,
    "google/flan-t5-xxl": 11_135_332_352,
    "google/mt5-small": 300_176_768,
    "google/mt5-base": 582_401_280,
    "google/mt5-xxl": 12_921_057_280,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "meta-llama/llama-2-7b-hf": 6_738_415_616,
    "meta-llama/llama-2-13b-hf": 13_015_864_320,
    "meta-llama/llama-2-70b-hf": 68_976_648_192,
    "meta-llama/meta-llama-3-8b": 8_030_261_248,
    "meta-llama/llama-3.1-70b": 70_553_706_496,
    "meta-llama/llama-3.2-1b": 1_235_814_400,
    "meta-llama/llama-3.2-3b": 3_212_749_824,
    "mistralai/mistral-7b-v0.1": 7_241_732_096,
    "mistralai/mistral-7b-v0.3": 7_248_023_552,
    "qwen/qwen2.5-0.5b": 494_032_768,
    "qwen/qwen2.5-1.5b": 1_543_714_304,
    "qwen/qwen2.5-7b": 7_615_616_512,
    "qwen/qwen3-0.6b": 596_049_920,
    "qwen/qwen3-8b": 8_190_735_360,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "microsoft/phi-3-mini-4k-instruct": 3_821_079_552,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-1b1": 1_065_314_304,
    "bigscience/bloom-7b1": 7_069_016_064,
    "bigscience/bloomz-1b1": 1_065_314_304,
    "eleutherai/pythia-1b": 1_011_781_632,
    "eleutherai/gpt-neox-20b": 20_554_567_680,
}
"""Parameter counts from the model cards and the safetensors headers on the Hub."""

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def total(config: dict[str, Any], *, pretrained: bool = True) -> int:
    return count_parameters(read_architecture(config), pretrained=pretrained).total


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_TOTALS.items())
def test_published_models_have_their_published_number_of_parameters(name: str, parameters: int) -> None:
    assert total(dict(KNOWN_CONFIGS[name])) == parameters


def test_every_published_configuration_can_be_counted() -> None:
    assert min(total(dict(config)) for config in KNOWN_CONFIGS.values()) == PUBLISHED_TOTALS["google-t5/t5-small"]


def test_published_model_is_found_by_its_source_in_any_case() -> None:
    assert known_config("hf://meta-llama/Meta-Llama-3-8B") == KNOWN_CONFIGS["meta-llama/meta-llama-3-8b"]
    assert known_config("hf://nobody/nothing") is None


def test_a_tied_output_projection_counts_once() -> None:
    assert total(TINY_LLAMA) - total(TINY_LLAMA | {"tie_word_embeddings": True}) == 10 * 8


@pytest.mark.parametrize(
    "mark", [{"tie_word_embeddings": False}, {"tie_word_embeddings": True, "scale_decoder_outputs": False}]
)
def test_t5_v1_1_has_an_output_projection_only_with_pretrained_weights(mark: dict[str, Any]) -> None:
    config = dict(KNOWN_CONFIGS["google-t5/t5-small"]) | mark

    assert total(config) - total(config, pretrained=False) == 32128 * 512


def test_parts_add_up_to_the_total() -> None:
    counts = count_parameters(read_architecture(KNOWN_CONFIGS["google/mt5-small"]))

    assert counts.embedding == counts.output == 250112 * 512
    assert counts.total == counts.embedding + counts.encoder + counts.decoder + counts.output
    assert counts.encoder < counts.decoder


def test_unknown_architecture_error_lists_supported_types_and_a_workaround() -> None:
    with pytest.raises(
        JobError, match=r"'xlnet'.*supported types are bart, bloom.*execution\.microBatchSize"
    ) as raised:
        read_architecture({"model_type": "xlnet"})

    assert "did you mean" not in str(raised.value)


def test_misspelt_architecture_error_suggests_the_nearest_name() -> None:
    with pytest.raises(JobError, match="did you mean 'llama'"):
        read_architecture({"model_type": "llama4"})


@pytest.mark.parametrize("config", [{}, {"model_type": ""}, {"model_type": 7}])
def test_a_file_without_model_type_is_no_model(config: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="no model_type"):
        read_architecture(config)


@pytest.mark.parametrize("value", [0, -1, 2.5, "12", True])
def test_a_size_that_is_no_whole_number_is_named(value: object) -> None:
    with pytest.raises(JobError, match=r"num_hidden_layers is .*expected a whole number"):
        read_architecture(TINY_LLAMA | {"num_hidden_layers": value})


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_a_missing_size_is_named(model_type: str) -> None:
    with pytest.raises(JobError, match=rf"config\.json of this {model_type} model has no "):
        read_architecture({"model_type": model_type})


def test_null_in_the_file_means_the_default() -> None:
    assert total(TINY_LLAMA | {"head_dim": None, "num_key_value_heads": None}) == total(TINY_LLAMA)
