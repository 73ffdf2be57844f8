"""Models of a few thousand random parameters, whose greedy answers vary, and what `model.generate` makes of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 97
EOS = 1

_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.6}
_ATTENTION = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_TOKENS = {"pad_token_id": 0, "eos_token_id": EOS, "bos_token_id": 2}


def toy_model(family: str, seed: int = 7, **values: Any) -> PreTrainedModel:
    """A random fp32 model in eval mode. Keyword arguments are values of its configuration."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = _BUILDERS[family](values)
    model.train(False)
    return model


def prompts(count: int, seed: int = 3, shortest: int = 1, longest: int = 23) -> list[tuple[int, ...]]:
    """Random prompts of different lengths, without special tokens."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(shortest, longest))) for _ in range(count)]


def generated_by_transformers(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The greedy answer of `model.generate` with the model's own generation configuration."""
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=False, num_beams=1, temperature=None, top_k=None, top_p=None, max_length=None)
    config.max_new_tokens = max_tokens
    ids = torch.tensor([list(prompt)])
    generate: Any = model.generate
    answer = generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)[0].tolist()
    return tuple(answer[1:] if model.config.is_encoder_decoder else answer[len(prompt) :])


def _gpt2(values: dict[str, Any]) -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, "initializer_range": 0.6, **_TOKENS, **values}))


def _llama(values: dict[str, Any]) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_SMALL, **_ATTENTION, "max_position_embeddings": 64, **_TOKENS, **values}))


def _mistral(values: dict[str, Any]) -> PreTrainedModel:
    limits = {"max_position_embeddings": 64, "sliding_window": 6}
    return MistralForCausalLM(MistralConfig(**{**_SMALL, **_ATTENTION, **limits, **_TOKENS, **values}))


def _qwen2(values: dict[str, Any]) -> PreTrainedModel:
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(**{**_SMALL, **_ATTENTION, **window, **_TOKENS, **values}))


def _gemma2(values: dict[str, Any]) -> PreTrainedModel:
    limits = {"max_position_embeddings": 64, "sliding_window": 7}
    return Gemma2ForCausalLM(Gemma2Config(**{**_SMALL, **_ATTENTION, **limits, **_TOKENS, **values}))


def _bloom(values: dict[str, Any]) -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.6}
    return BloomForCausalLM(BloomConfig(**{**sizes, **_TOKENS, **values}))


def _t5(values: dict[str, Any]) -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    tokens = {"pad_token_id": 0, "eos_token_id": EOS, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**{**sizes, "initializer_factor": 3.0, **tokens, **values}))


def _bart(values: dict[str, Any]) -> PreTrainedModel:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.5}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    tokens = {**_TOKENS, "decoder_start_token_id": EOS, "forced_eos_token_id": None}
    return BartForConditionalGeneration(BartConfig(**{**sizes, **tokens, **values}))


_BUILDERS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "gemma2": _gemma2,
    "bloom": _bloom,
    "t5": _t5,
    "bart": _bart,
}
CAUSAL = ("gpt2", "llama", "mistral", "qwen2", "gemma2", "bloom")
SEQ2SEQ = ("t5", "bart")
