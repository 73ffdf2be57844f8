"""Configurations of well-known published models, for planning without network access.

They contain only the keys that determine a model's size. Tests compare the resulting parameter counts with the
published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_Config = Mapping[str, Any]


def known_config(source: str) -> _Config | None:
    """The `config.json` keys of an `hf://owner/name` source, case-insensitive; `None` if the model is unknown."""
    return KNOWN_CONFIGS.get(source.removeprefix("hf://").strip("/").lower())


def _t5(model: int, feed_forward: int, layers: int, heads: int, kv: int = 64, vocabulary: int = 32128) -> _Config:
    return {
        "model_type": "t5",
        "d_model": model,
        "d_ff": feed_forward,
        "num_layers": layers,
        "num_heads": heads,
        "d_kv": kv,
        "vocab_size": vocabulary,
        "feed_forward_proj": "relu",
        "dropout_rate": 0.1,
    }


def _t5_v1_1(model: int, feed_forward: int, layers: int, heads: int, **changes: Any) -> _Config:
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return {**_t5(model, feed_forward, layers, heads), **gated, **changes}


def _bert(vocabulary: int) -> _Config:
    return {"model_type": "bert", "vocab_size": vocabulary, "hidden_size": 768, "hidden_dropout_prob": 0.1}


def _gpt2(hidden: int, layers: int, heads: int) -> _Config:
    size = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "resid_pdrop": 0.1, **size}


def _bloom(hidden: int, layers: int, heads: int) -> _Config:
    return {"model_type": "bloom", "vocab_size": 250880, "n_embed": hidden, "n_layer": layers, "n_head": heads}


def _llama_like(
    model_type: str,
    vocabulary: int,
    hidden: int,
    feed_forward: int,
    layers: int,
    heads: int,
    key_values: int,
    **more: Any,
) -> _Config:
    return {
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        **more,
    }


_T5_V1_1_SIZES = {
    "small": (512, 1024, 8, 6),
    "base": (768, 2048, 12, 12),
    "large": (1024, 2816, 24, 16),
    "xl": (2048, 5120, 24, 32),
    "xxl": (4096, 10240, 24, 64),
}
_MT5: dict[str, Any] = {"model_type": "mt5", "vocab_size": 250112}
_LLAMA_3_8B = _llama_like("llama", 128256, 4096, 14336, 32, 32, 8)
_LLAMA_3_70B = _llama_like("llama", 128256, 8192, 28672, 80, 64, 8)

KNOWN_CONFIGS: dict[str, _Config] = {
    "google-t5/t5-small": _t5(512, 2048, 6, 8),
    "google-t5/t5-base": _t5(768, 3072, 12, 12),
    "google-t5/t5-large": _t5(1024, 4096, 24, 16),
    "google-t5/t5-3b": _t5(1024, 16384, 24, 32, kv=128),
    "google-t5/t5-11b": _t5(1024, 65536, 24, 128, kv=128),
    **{f"google/t5-v1_1-{name}": _t5_v1_1(*sizes) for name, sizes in _T5_V1_1_SIZES.items()},
    **{f"google/flan-t5-{name}": _t5_v1_1(*sizes) for name, sizes in _T5_V1_1_SIZES.items()},
    **{f"google/mt5-{name}": _t5_v1_1(*sizes, **_MT5) for name, sizes in _T5_V1_1_SIZES.items()},
    "google-bert/bert-base-uncased": _bert(30522),
    "google-bert/bert-base-cased": _bert(28996),
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "meta-llama/llama-2-7b-hf": _llama_like("llama", 32000, 4096, 11008, 32, 32, 32),
    "meta-llama/llama-2-13b-hf": _llama_like("llama", 32000, 5120, 13824, 40, 40, 40),
    "meta-llama/llama-2-70b-hf": _llama_like("llama", 32000, 8192, 28672, 80, 64, 8),
    "meta-llama/meta-llama-3-8b": _LLAMA_3_8B,
    "meta-llama/meta-llama-3-70b": _LLAMA_3_70B,
    "meta-llama/llama-3.1-8b": _LLAMA_3_8B,
    "meta-llama/llama-3.1-70b": _LLAMA_3_70B,
    "meta-llama/llama-3.2-1b": _llama_like("llama", 128256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True),
    "meta-llama/llama-3.2-3b": _llama_like("llama", 128256, 3072, 8192, 28, 24, 8, tie_word_embeddings=True),
    "mistralai/mistral-7b-v0.1": _llama_like("mistral", 32000, 4096, 14336, 32, 32, 8),
    "huggingfaceh4/mistral-7b-sft-beta": _llama_like("mistral", 32000, 4096, 14336, 32, 32, 8),
    "mistralai/mistral-7b-v0.3": _llama_like("mistral", 32768, 4096, 14336, 32, 32, 8),
    "qwen/qwen2.5-0.5b": _llama_like("qwen2", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "qwen/qwen2.5-1.5b": _llama_like("qwen2", 151936, 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "qwen/qwen2.5-7b": _llama_like("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "qwen/qwen3-0.6b": _llama_like("qwen3", 151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True),
    "qwen/qwen3-8b": _llama_like("qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128),
    "google/gemma-2b": _llama_like("gemma", 256000, 2048, 16384, 18, 8, 1, head_dim=256),
    "google/gemma-7b": _llama_like("gemma", 256000, 3072, 24576, 28, 16, 16, head_dim=256),
    "google/gemma-2-2b": _llama_like("gemma2", 256000, 2304, 9216, 26, 8, 4, head_dim=256),
    "google/gemma-2-9b": _llama_like("gemma2", 256000, 3584, 14336, 42, 16, 8, head_dim=256),
    "microsoft/phi-3-mini-4k-instruct": _llama_like("phi3", 32064, 3072, 8192, 32, 32, 32),
    "bigscience/bloom-560m": _bloom(1024, 24, 16),
    "bigscience/bloom-1b1": _bloom(1536, 24, 16),
    "bigscience/bloom-7b1": _bloom(4096, 30, 32),
    "bigscience/bloomz-1b1": _bloom(1536, 24, 16),
    "eleutherai/pythia-1b": _llama_like("gpt_neox", 50304, 2048, 8192, 16, 8, 8),
    "eleutherai/gpt-neox-20b": _llama_like("gpt_neox", 50432, 6144, 24576, 44, 64, 64),
}
"""Keys are `owner/name` in lower case."""
