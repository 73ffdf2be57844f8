"""FP8: the matrix products of a model's layers are computed from 8-bit floats, by torchao's float8 training.

Weights, gradients and optimizer states stay what they are: bfloat16 and float32. Each product casts its two factors to
8 bits first (e4m3; tensorwise gradients e5m2; Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433), with scales
from the largest elements of these very factors. So there is no state to save, and a resumed run computes the same bits.

Evaluation and generation compute in bfloat16, as the exported model does. On processors torchao emulates FP8: it rounds
to the same 8-bit values, and multiplies in the model's precision.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from spotune.errors import JobError
from spotune.job.execution import Precision
from spotune.plan.devices import missing_capability

logger = logging.getLogger("spotune.worker")

MULTIPLE: Final = 16
"""Kernels for FP8 need matrices whose two sizes are multiples of this."""


class _TrainedInFloat8(Float8Linear):  # type: ignore[misc]
    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = super().forward(rows) if self.training else nn.Linear.forward(self, rows)
        return product


def check_device(precision: Precision) -> None:
    """Check that the GPU of this process can compute in a precision; processors emulate all of them.

    Raises:
        JobError: it cannot.
    """
    if torch.cuda.is_available():
        problem = missing_capability(precision, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
        if problem:
            raise JobError(problem)


def convert_to_float8(layers: Iterable[nn.Module], precision: Precision) -> list[str]:
    """Make the linear modules of these layers compute in FP8. Parameters and their names stay.

    With an adapter, the frozen weights are converted and the adapter's own matrices are not: casts of such narrow
    matrices would take longer than they save.

    Args:
        layers: modified.
        precision: `fp8` or `fp8-rowwise`.

    Returns:
        Names of modules that stay in bfloat16, because a size is no multiple of 16.

    Raises:
        JobError: there is nothing to convert.
    """
    layers = list(layers)
    has_adapter = any(not parameter.requires_grad for layer in layers for parameter in layer.parameters())
    skipped: set[str] = set()

    def is_converted(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or module.weight.requires_grad == has_adapter:
            return False
        if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            skipped.add(f"{name} ({module.in_features} x {module.out_features})")
            return False
        return True

    converted = 0
    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=is_converted, config=_recipe(precision))
        for module in layer.modules():
            if type(module) is Float8Linear:
                module.__class__ = _TrainedInFloat8
                converted += 1
    names = ", ".join(sorted(skipped))
    if not converted:
        reason = f"the sizes of all are no multiples of {MULTIPLE}: {names}" if skipped else "its layers have none"
        raise JobError(
            f"execution.precision: {precision} is for linear modules of a model, but {reason}. Set it to auto"
        )
    if skipped:
        logger.warning("%s: bfloat16 remains where sizes are no multiples of %d: %s", precision, MULTIPLE, names)
    return sorted(skipped)


def _recipe(precision: Precision) -> Float8LinearConfig:
    recipe = Float8LinearConfig.from_recipe_name("rowwise" if precision == "fp8-rowwise" else "tensorwise")
    return replace(recipe, emulate=not torch.cuda.is_available())
