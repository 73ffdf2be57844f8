"""LoRA adapters of toy models, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from tests.serve.support.toy_models import toy_model

PEFT_WARNING = "ignore:`is_gradient_checkpointing`:FutureWarning"
"""A filter for tests with adapters: peft calls a deprecated method of transformers."""
_TARGETS = {"llama": ["q_proj", "v_proj"], "t5": ["q", "v"], "gpt2": ["c_attn", "c_fc"]}


def save_adapter(directory: Path, family: str = "llama", seed: int = 0, **values: Any) -> tuple[Path, PreTrainedModel]:
    """Save a random LoRA adapter of a toy model; returns the folder, and the model with the merged adapter.

    Keyword arguments are values of the model's configuration.
    """
    return directory, save_adapter_of(toy_model(family, **values), directory, _TARGETS[family], seed)


def save_adapter_of(base: PreTrainedModel, directory: Path, targets: list[str], seed: int) -> PreTrainedModel:
    """Save a random LoRA adapter of a model; returns the model with the merged adapter.

    Args:
        base: changed in place.
        directory: of the adapter.
        targets: names of the modules that it changes.
        seed: of its weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=2,
            lora_alpha=8,
            target_modules=targets,
            init_lora_weights=False,
            fan_in_fan_out=base.config.model_type == "gpt2",
        )
        model: Any = get_peft_model(base, config)
    model.save_pretrained(directory)
    merged: PreTrainedModel = model.merge_and_unload()
    return merged
