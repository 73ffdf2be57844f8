"""Compile the layers of a transformer with torch.compile.

A model is a stack of layers with the same code. Each layer is compiled as a function of its own, and all of them share
the compiled code. Hooks around a layer stay outside of it: at ZeRO stage 3 they gather the weights.

Shapes are static, so that a resumed run computes the same bits. The kernel for a shape depends on that shape alone, not
on which shapes came before. Where the compiler has a choice of kernels on a GPU it measures them and takes the fastest;
with `execution.deterministic` it has no such choice for sums. Every new shape is compiled, so batches are padded to a
multiple of `PAD_TO_MULTIPLE_OF` tokens. Evaluation has batches of many shapes, and runs without compiled layers.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spotune_trainer.engine.activations.recomputation import RecomputeLayer
from spotune_trainer.engine.compile.addmm_fusion import AddmmFusion
from spotune_trainer.engine.compile.gradient_accumulation_fusion import fuse_gradient_accumulation
from spotune_trainer.engine.compile.residual_saving import SaveResidualSums

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAD_TO_MULTIPLE_OF = 128
"""Batches are padded to a multiple of so many tokens; GPUs multiply such matrices faster, too."""
_OPTIONS: dict[str, Any] = {
    "joint_custom_pre_pass": SaveResidualSums(),
    "post_grad_custom_pre_pass": AddmmFusion(),
}
"""Of torch.compile. Layers share compiled code only if their options are the very same object."""
_RECOMPUTED_OPTIONS: dict[str, Any] = {**_OPTIONS, "joint_custom_post_pass": RecomputeLayer()}
"""Of layers that the backward pass computes again."""
_MAX_SHAPES = 256
"""Number of input shapes of a layer after which torch.compile runs it without compiling."""


def missing_compiler(*, on_gpus: bool) -> str | None:
    """What torch.compile needs and this machine does not have, for a message; None if nothing is missing.

    For GPUs Triton compiles kernel launchers from C. For CPUs the kernels themselves are C++.
    """
    compilers = ("cc", "gcc", "clang") if on_gpus else ("g++", "clang++")
    if not any(shutil.which(name) for name in compilers):
        return f"a compiler ({compilers[-2]})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers (python3-dev)"
    return None


def compile_layers(model: PreTrainedModel, recomputed: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Compile the model's layers, and the norms outside of them.

    Args:
        model: the layers' `forward` is replaced.
        recomputed: layers that the backward pass computes again. The model's own gradient checkpointing must be off.

    Returns:
        The layers.
    """
    dynamo: Any = torch._dynamo
    dynamo.config.recompile_limit = _MAX_SHAPES
    dynamo.config.accumulated_recompile_limit = max(_MAX_SHAPES, dynamo.config.accumulated_recompile_limit)
    layers = repeated_layers(model)
    fuse_gradient_accumulation(layers)
    in_layers = {module for layer in layers for module in layer.modules()}
    norms = [m for m in model.modules() if m not in in_layers and "norm" in type(m).__name__.lower()]
    for module in [*layers, *norms]:
        module.forward = _compiled_in_training(module, _RECOMPUTED_OPTIONS if module in recomputed else _OPTIONS)
    return layers


def repeated_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of encoder and decoder: the modules that `transformers` never splits over devices.

    It does not split the embeddings of BERT either, but they are no layer: their inputs have no gradient.
    """
    names = set(model._no_split_modules or ())
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [layer for layers in lists for layer in layers if type(layer).__name__ in names]


def _compiled_in_training(module: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    eager = module.forward
    compiled = torch.compile(eager, dynamic=False, options=options)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if module.training else eager)(*args, **kwargs)

    return forward
