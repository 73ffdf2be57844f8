"""Exported models of a few thousand random weights, as `spotune run` leaves them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from spotune.prompting.export_manifest import MANIFEST, ExportManifest
from tests.serve.support.served_models import CHAT_TEMPLATE
from tests.trainer.support.tiny import save_config, save_tokenizer

_SPREAD = 0.5
"""Standard deviation of the logits' weights: large enough that answers vary with the prompt."""


def export_tiny_model(directory: Path, task: str, prompt: str = "{question}", *, seed: int = 3, **values: Any) -> Path:
    """Write an export directory with a random Llama or T5, whose weights depend on the seed; returns it.

    Further keyword arguments are values of the model's configuration.
    """
    directory.mkdir(exist_ok=True)
    save_config(directory, task, **({"decoder_start_token_id": 0} if task == "seq2seq" else {}), **values)
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
    _write_manifest(directory, ExportManifest(f"tiny-{task}", task, prompt, "", max_length=64, max_new_tokens=32))
    return directory


def export_tiny_chat_model(directory: Path) -> Path:
    """Write an export directory with a random Llama that chats, and answers with up to 256 tokens; returns it."""
    export_tiny_model(directory, "causal")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    _write_manifest(directory, ExportManifest("tiny-chat", "causal", "", "messages", 1024, max_new_tokens=256))
    return directory


def _write_manifest(directory: Path, manifest: ExportManifest) -> None:
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest)))
