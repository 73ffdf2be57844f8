"""Whether LoRA adapters fit their base model, by the shapes of their matrices alone: no weights are loaded.

vLLM loads an adapter with its first request, and fails there if the base is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from spotune.errors import JobError
from spotune_serve.engine.adapters.config import ADAPTER_WEIGHTS, base_of, read_adapter_config

Shape = tuple[int, ...]

_PREFIX = "base_model.model."
"""Of all names in an adapter that peft saved."""


def check_adapter_shapes(directory: Path, adapters: Mapping[str, Path]) -> None:
    """Refuse LoRA adapters whose matrices do not fit the layers of a causal model.

    A layer of shape [out, in] has the matrices A [rank, in] and B [out, rank] (Hu et al. 2021, arXiv 2106.09685,
    section 4.1). Experts are not checked: peft and transformers name them in several ways.

    Args:
        directory: of the base model; its architecture can be served.
        adapters: folders that peft saved, by name; each has an adapter_config.json with the rank `r`.

    Raises:
        JobError: an adapter is for another base, or its file is damaged. It names adapter, layer and shapes.
    """
    if not adapters:
        return
    layers = _layer_shapes(directory)
    for name, folder in adapters.items():
        config = read_adapter_config(name, folder)
        rank, fix = int(config["r"]), f"Serve the adapter with its base model{base_of(config)}, or export it again."
        for key, shape in _matrix_shapes(name, folder).items():
            layer, _, matrix = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            if matrix not in ("lora_A", "lora_B") or ".experts" in layer:
                continue
            place = f"adapter {name!r} in {folder} is for another base model than {directory}: "
            if layer not in layers:
                raise JobError(f"{place}the base has no linear layer {layer!r}. {fix}")
            outputs, inputs = layers[layer]
            needed = (rank, inputs) if matrix == "lora_A" else (outputs, rank)
            if shape != needed:
                raise JobError(f"{place}{matrix} of {layer!r} is {list(shape)}, and has to be {list(needed)}. {fix}")


def _layer_shapes(directory: Path) -> dict[str, Shape]:
    """Outputs and inputs of the linear layers of a causal model, by name."""
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, Shape] = {}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, nn.Linear):
            shapes[name] = tuple(weight.shape)
        elif isinstance(module, Conv1D):  # of GPT-2
            shapes[name] = tuple(reversed(weight.shape))
    return shapes


def _matrix_shapes(name: str, folder: Path) -> dict[str, Shape]:
    """The shapes in the header of an adapter's file."""
    file = folder / ADAPTER_WEIGHTS
    opened: Any = safe_open
    try:
        with opened(str(file), framework="pt") as tensors:
            return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise JobError(f"adapter {name!r}: {file} is damaged: {error}. Export the adapter again.") from error
