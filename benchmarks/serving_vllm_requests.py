"""Model, adapters and requests of `benchmarks.serving_vllm`, and how it asks an engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from spotune_serve.engine.base import Engine, GenerationRequest, SamplingParams

PROMPT_TOKENS, NEW_TOKENS = 219, 195
"""The means of ShareGPT."""
VOCABULARY, LAYERS, HIDDEN, EOS, MAX_LENGTH = 32_000, 22, 2048, 2, 2048
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "penalties": {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}

Tokens = list[int]


def write_model(directory: Path) -> None:
    """A random Llama as transformers saves it."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=5632, num_hidden_layers=LAYERS,
        num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=MAX_LENGTH, bos_token_id=1,
        eos_token_id=EOS, pad_token_id=0, initializer_range=0.05,
    )  # fmt: skip
    with torch.device("cuda"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    model.to("cpu").save_pretrained(directory)


def write_adapter(directory: Path, seed: int, rank: int = 8) -> None:
    """A random LoRA adapter for queries and values, as peft saves it."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, width in (("q_proj", HIDDEN), ("v_proj", 256)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=draw).bfloat16() * 0.05
            weights[f"{name}.lora_B.weight"] = torch.randn(width, rank, generator=draw).bfloat16() * 0.05
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def request(number: int, kind: str, series: str = "", **sampling: Any) -> GenerationRequest:
    """One of the requests of a series, which have different prompts."""
    draw = random.Random(f"{series} {number}")
    prompt = tuple(draw.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS))
    values = {"max_tokens": NEW_TOKENS, "seed": number, "ignore_eos": True, **KINDS[kind], **sampling}
    return GenerationRequest(f"{series}-{number}", prompt, SamplingParams(**values))


async def tokens_of(engine: Engine, asked: GenerationRequest) -> AsyncIterator[int]:
    """The new tokens of a request."""
    async for chunk in engine.generate(asked):
        for token in chunk.tokens:
            yield token.token


async def answer(engine: Engine, asked: GenerationRequest) -> Tokens:
    """All new tokens of a request."""
    return [token async for token in tokens_of(engine, asked)]


async def answers(engine: Engine, asked: Sequence[GenerationRequest]) -> list[Tokens]:
    """The answers to concurrent requests."""
    return list(await asyncio.gather(*(answer(engine, each) for each in asked)))
