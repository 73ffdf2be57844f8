"""The configuration of an adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spotune.errors import JobError

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"


def read_adapter_config(name: str, directory: Path) -> dict[str, Any]:
    """The configuration of a LoRA adapter.

    Args:
        name: in requests.
        directory: that peft saved.

    Raises:
        JobError: a file is missing or damaged, or it is another kind of adapter.
    """
    place = f"adapter {name!r} in {directory}"
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (directory / file).is_file():
            raise JobError(f"{place} has no {file}. Name a folder that peft's save_pretrained has written.")
    try:
        config: dict[str, Any] = dict(json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise JobError(f"{place}: {ADAPTER_CONFIG} is damaged: {error}. Export the adapter again.") from error
    kind, bias = config.get("peft_type"), config.get("bias", "none")
    if kind != "LORA" or bias != "none":
        what = f"a {kind} adapter" if kind != "LORA" else f"a LoRA adapter that changes biases (bias: {bias})"
        raise JobError(f"{place} is {what}; only LoRA adapters with bias: none can be served beside their base model.")
    return config


def base_of(config: Mapping[str, Any]) -> str:
    """The base model that an adapter's configuration names, in parentheses after a space; empty if it names none."""
    base = config.get("base_model_name_or_path")
    return f" ({base})" if base else ""
