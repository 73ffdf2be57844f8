"""Served models with real tokenizers, and folders to load them from."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spotune.prompting.export_manifest import MANIFEST
from spotune_serve.gateway.served_model import ServedModel
from tests.trainer.support.tiny import save_config, save_tokenizer

CHAT_TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ tool_choice }}|{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.arguments.city }}]{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SQL_TEMPLATE = "question: {question} columns: {columns}"


def save_model(
    directory: Path,
    task: str = "causal",
    *,
    prompt: str = "",
    messages: str = "",
    chat: bool = False,
    name: str = "tiny",
) -> Path:
    """An export directory without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    save_config(directory, task, **({"max_position_embeddings": 256} if task == "causal" else {}))
    tokenizer = save_tokenizer(directory)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(directory)
    manifest = {"name": name, "task": task, "prompt": prompt, "messages": messages}
    (directory / MANIFEST).write_text(json.dumps({**manifest, "max_length": 64, "max_new_tokens": 32}))
    return directory


def load_model(
    directory: Path, task: str = "causal", *, prompt: str = "", messages: str = "", chat: bool = False
) -> ServedModel:
    """The served model of `save_model`, with an adapter `polite`."""
    save_model(directory, task, prompt=prompt, messages=messages, chat=chat)
    adapter = directory / "polite"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    return ServedModel.load(directory, adapters={"polite": adapter})


def sentencepiece_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer like Llama 2's: Metaspace pieces, byte fallback, and a decoder that strips the first space."""
    pieces = [
        "<unk>",
        "</s>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "b",
        "▁the",
        "re",
        ".",
        "é",
    ]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", bos_token="<s>")
