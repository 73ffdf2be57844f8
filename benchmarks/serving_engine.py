"""The engine of `spotune serve` on one device: tokens per second, and whether continued answers stay the same.

Usage:
    python -m benchmarks.serving_engine --output benchmarks/results/serving_engine_gpu.json

Random weights of a Llama and a T5, so nothing is downloaded. `generate()` of transformers is timed beside the engine in
the same run. A continued answer stops after half of its tokens and is sent again with them, alone instead of in a
batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig, LlamaConfig, T5Config

from spotune_serve.engine.base import GenerationRequest, SamplingParams
from spotune_serve.engine.transformers_engine import TransformersEngine
from spotune_serve.engine.weights.load import load_adapters
from tests.provenance import commit

PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 128, 128, 32_000
BATCHES = (1, 32)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(kind: str, dtype: str, device: str) -> Any:
    """A model of 160 (Llama) or 220 (T5) million random parameters."""
    torch.manual_seed(0)
    if kind == "llama":
        config: Any = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
            num_attention_heads=12, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.1,
        )  # fmt: skip
        auto: Any = AutoModelForCausalLM
    else:
        config = T5Config(vocab_size=VOCABULARY, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)
        config.decoder_start_token_id = 0
        auto = AutoModelForSeq2SeqLM
    model = auto.from_config(config, dtype=DTYPES[dtype]).to(device).eval()
    eos = {"llama": 2, "t5": 1}[kind]
    start = {"decoder_start_token_id": 0} if kind == "t5" else {}
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=0, **start)
    return model


def request(number: int, temperature: float) -> GenerationRequest:
    """One of the requests, which have different prompts."""
    prompt = torch.randint(3, VOCABULARY, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(number)).tolist()
    sampling = SamplingParams(max_tokens=NEW_TOKENS, seed=number, temperature=temperature, ignore_eos=True)
    return GenerationRequest(str(number), tuple(prompt), sampling)


async def answer(engine: TransformersEngine, generation: GenerationRequest) -> list[int]:
    """The tokens of one answer."""
    return [token.token async for chunk in engine.generate(generation) for token in chunk.tokens]


async def measure(engine: TransformersEngine, batch: int, temperature: float) -> tuple[float, list[list[int]]]:
    """Generated tokens per second of `batch` requests at once, and their answers."""
    start = time.perf_counter()
    answers = await asyncio.gather(*(answer(engine, request(number, temperature)) for number in range(batch)))
    return batch * NEW_TOKENS / (time.perf_counter() - start), answers


async def share_continued(engine: TransformersEngine, answers: list[list[int]], temperature: float) -> float:
    """The share of answers that are the same when their second half is generated anew."""
    same = 0
    for number, whole in enumerate(answers):
        half = tuple(whole[: NEW_TOKENS // 2])
        same += [*half, *await answer(engine, replace(request(number, temperature), generated=half))] == whole
    return same / len(answers)


def generate_rate(model: Any, batch: int) -> float:
    """Generated tokens per second of `generate()` on one batch, greedy."""
    prompts = torch.tensor([request(number, 0.0).prompt for number in range(batch)], device=model.device)
    start = time.perf_counter()
    model.generate(prompts, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    return batch * NEW_TOKENS / (time.perf_counter() - start)


async def run(kind: str, dtype: str, device: str) -> dict[str, Any]:
    """All figures of one model."""
    model = build(kind, dtype, device)
    generate_rate(model, 1)
    generate = {batch: round(generate_rate(model, batch)) for batch in BATCHES}
    engine = TransformersEngine(load_adapters(model, {}))
    await measure(engine, 1, 0.0)
    rates: dict[str, dict[int, int]] = {}
    continued: dict[str, float] = {}
    answers: list[list[int]] = []
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        rates[name] = {}
        for batch in BATCHES:
            rate, answers = await measure(engine, batch, temperature)
            rates[name][batch] = round(rate)
        continued[name] = await share_continued(engine, answers, temperature)
    await engine.close()
    return {
        "tokens_per_second": rates,
        "generate_tokens_per_second": generate,
        "share_of_32_continued_answers_that_are_equal": continued,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "commit": commit(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
    }
    for kind in ("llama", "t5"):
        for dtype in DTYPES:
            with torch.inference_mode():
                found[f"{kind}, {dtype}"] = asyncio.run(run(kind, dtype, device))
            print(kind, dtype, json.dumps(found[f"{kind}, {dtype}"]), flush=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
