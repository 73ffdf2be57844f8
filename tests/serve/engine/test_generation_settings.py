from typing import Any

import pytest
from transformers import GenerationConfig

from spotune.errors import JobError
from spotune_serve.engine.generation_settings import APPLIED, REFUSED
from spotune_serve.engine.model import LoadedModel
from tests.serve.support.generating import ask, request
from tests.serve.support.toy_models import EOS, generated_by_transformers, prompts, toy_model

_OF_THE_REQUEST = {
    # Sampling or greedy, and its parameters.
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    # Lengths, number of sequences, and what else is returned.
    "max_length", "max_new_tokens", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "return_dict_in_generate",
    # Beam search.
    "num_beams", "num_beam_groups", "early_stopping", "length_penalty", "diversity_penalty",
}  # fmt: skip
_WITHOUT_EFFECT_ON_TOKENS = {
    "use_cache", "use_mtp", "cache_implementation", "cache_config", "max_cache_len", "compile_config",
    "disable_compile", "continuous_batching_config", "low_memory", "prefill_chunk_size", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "speculation_type", "transformers_version",
}  # fmt: skip
_TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}

_CAUSAL_SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"no_repeat_ngram_size": 1},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 1},
    {"bad_words_ids": [*([token] for token in range(3, 50)), [60, 61]]},
    {"sequence_bias": [[[7], 40.0], [[7, 7], -60.0]]},
    {"min_new_tokens": 7, "sequence_bias": [[[EOS], 30.0]]},
    {"min_length": 9, "sequence_bias": [[[EOS], 30.0]]},
    {"forced_eos_token_id": EOS},
    {"exponential_decay_length_penalty": (3, 1.9)},
    {"suppress_tokens": list(range(3, 60))},
    {"begin_suppress_tokens": list(range(90))},
    {"remove_invalid_values": True, "renormalize_logits": True},
    {"eos_token_id": list(range(1, 30))},
    {"num_beams": 4, "do_sample": True, "temperature": 0.3, "top_k": 5},
]
_SEQ2SEQ_SETTINGS: list[dict[str, Any]] = [
    *_CAUSAL_SETTINGS,
    {"forced_bos_token_id": 33},
    {"forced_bos_token_id": 33, "begin_suppress_tokens": list(range(90))},
]


@pytest.mark.parametrize(
    ("family", "settings"),
    [*(("llama", each) for each in _CAUSAL_SETTINGS), *(("t5", each) for each in _SEQ2SEQ_SETTINGS)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_greedy_tokens_equal_those_of_generate_under_each_setting(family: str, settings: dict[str, Any]) -> None:
    model = toy_model(family)
    asked = [*prompts(2, shortest=2, longest=5), *prompts(2, shortest=25, longest=30)]
    plain = [generated_by_transformers(model, prompt, 10) for prompt in asked]
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    expected = [generated_by_transformers(model, prompt, 10) for prompt in asked]
    unchanged = {"remove_invalid_values", "num_beams"} & settings.keys()
    assert unchanged or expected != plain, "the setting must change an answer, or the test shows nothing"
    assert ask(model, [request(prompt, 10) for prompt in asked]) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("guidance_scale", 1.5), ("stop_strings", ["END"]), ("penalty_alpha", 0.6), ("token_healing", True)],
)
def test_unsupported_setting_is_refused_by_name(name: str, value: Any) -> None:
    model = toy_model("llama")
    setattr(model.generation_config, name, value)
    with pytest.raises(JobError, match=f"generation_config.json has {name}: .*Remove {name}"):
        LoadedModel(model)


def test_invalid_value_is_refused_when_the_model_is_loaded() -> None:
    model = toy_model("llama")
    model.generation_config.repetition_penalty = 2  # must be a float
    with pytest.raises(JobError, match=r"invalid value: .*strictly positive float, but is 2"):
        LoadedModel(model)


def test_every_setting_of_transformers_is_applied_refused_or_without_effect() -> None:
    known = {*APPLIED, *REFUSED, *_OF_THE_REQUEST, *_WITHOUT_EFFECT_ON_TOKENS, *_TOKENS}
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert names - known == set()


def test_encoder_decoder_model_without_start_token_is_refused() -> None:
    model = toy_model("t5")
    model.generation_config.decoder_start_token_id = None
    model.generation_config.bos_token_id = None
    with pytest.raises(JobError, match="decoder_start_token_id: None"):
        LoadedModel(model)
