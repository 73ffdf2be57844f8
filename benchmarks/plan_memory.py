"""Measures the peak GPU memory of one micro-batch, to check the activation formulas of `spotune plan`.

    python -m benchmarks.plan_memory > benchmarks/plan_memory.json

Needs one GPU with 100 GB and no network: the models of `spotune.plan.known_models` get random weights. The result is
the memory of a forward and backward pass beyond weights and gradients, with the loss of `spotune_trainer.models.loss`
(float32 cross-entropy over all tokens) and a padded batch. `tests/api/plan/test_measured.py` compares it with the plan.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from spotune.plan.known_models import KNOWN_CONFIGS
from tests.provenance import commit


@dataclass(frozen=True)
class Case:
    """One model and the shape of its micro-batch."""

    model: str
    dtype: str
    micro_batch_size: int
    sequence_length: int
    target_length: int = 0
    gradient_checkpointing: bool = False


SHAPES = [
    ("google-t5/t5-large", "bfloat16", 16, 512, 128),
    ("google-t5/t5-large", "float32", 8, 512, 128),
    ("google-t5/t5-3b", "bfloat16", 8, 512, 128),
    ("google/flan-t5-xl", "bfloat16", 8, 512, 128),
    ("google/mt5-base", "bfloat16", 8, 512, 128),
    ("openai-community/gpt2-xl", "bfloat16", 8, 1024, 0),
    ("meta-llama/llama-3.2-1b", "bfloat16", 4, 2048, 0),
    ("meta-llama/llama-3.2-1b", "float32", 2, 2048, 0),
    ("meta-llama/llama-3.1-8b", "bfloat16", 2, 4096, 0),
    ("qwen/qwen2.5-1.5b", "bfloat16", 4, 2048, 0),
    ("qwen/qwen3-0.6b", "bfloat16", 4, 2048, 0),
    ("google/gemma-2b", "bfloat16", 4, 2048, 0),
    ("google/gemma-2-2b", "bfloat16", 4, 2048, 0),
    ("microsoft/phi-3-mini-4k-instruct", "bfloat16", 2, 2048, 0),
    ("eleutherai/pythia-1b", "bfloat16", 8, 2048, 0),
    ("bigscience/bloom-560m", "bfloat16", 4, 1024, 0),
]


def main() -> None:
    """Measure every case and print one JSON document."""
    device = torch.cuda.get_device_properties(0)
    measured = [{**asdict(case), "peak_bytes": measure(case)} for case in cases()]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = {"machine": device.name, "device_bytes": device.total_memory}
    result = {"commit": commit(), **machine, "versions": versions, "measured": measured}
    json.dump(result, sys.stdout, indent=1)
    sys.stdout.write("\n")


def cases() -> Iterator[Case]:
    """Every shape, without and with gradient checkpointing."""
    for shape in SHAPES:
        yield Case(*shape)
        yield Case(*shape, gradient_checkpointing=True)


def measure(case: Case) -> int:
    """Bytes at the peak of the second forward and backward pass, beyond weights and gradients."""
    model = build_model(case)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held = torch.cuda.memory_allocated()
    train(model, case)
    torch.cuda.reset_peak_memory_stats()
    train(model, case)
    peak = torch.cuda.max_memory_allocated() - held
    del model, parameter
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def build_model(case: Case) -> Any:
    """The model with random weights on the GPU, in training mode."""
    values = dict(KNOWN_CONFIGS[case.model])
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    auto_model: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("cuda"):
        model = auto_model.from_config(config, dtype=getattr(torch, case.dtype))
    if config.is_encoder_decoder:
        model.config.decoder_start_token_id = 0
    if case.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def train(model: Any, case: Case) -> None:
    """One forward and backward pass."""
    summed_loss(model, case).backward()
    torch.cuda.synchronize()


def summed_loss(model: Any, case: Case) -> Any:
    """Loss of a batch with three tokens of padding, computed as `spotune_trainer.models.loss.summed_loss` does."""
    ids = torch.randint(3, 1000, (case.micro_batch_size, case.sequence_length), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    labels = ids
    if case.target_length:
        labels = torch.randint(3, 1000, (case.micro_batch_size, case.target_length), device="cuda")
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    logits = model(**inputs).logits
    if not case.target_length:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(logits.reshape(-1, logits.size(-1)).float(), labels.reshape(-1), reduction="sum")


if __name__ == "__main__":
    main()
