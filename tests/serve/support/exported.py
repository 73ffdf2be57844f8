"""Exported models of a few thousand random weights, as `spotune run` leaves them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from spotune.prompting.export_manifest import MANIFEST, ExportManifest
from tests.trainer.support.tiny import save_config, save_tokenizer

_SPREAD = 0.5
"""Standard deviation of the logits' weights: large enough that answers vary with the prompt."""


def export_tiny_model(directory: Path, task: str, prompt: str = "{question}", *, seed: int = 3) -> Path:
    """Write an export directory with a random Llama or T5, whose weights depend on the seed; returns it."""
    directory.mkdir(exist_ok=True)
    save_config(directory, task, **({"decoder_start_token_id": 0} if task == "seq2seq" else {}))
    tokenizer = save_tokenizer(directory)
    auto: Any = AutoModelForSeq2SeqLM if task == "seq2seq" else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(AutoConfig.from_pretrained(directory))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, _SPREAD)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    manifest = ExportManifest(f"tiny-{task}", task, prompt, "", max_length=64, max_new_tokens=32)
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest)))
    return directory
