"""Gradient accumulation fusion: the matrix product of a weight gradient adds to the accumulated gradient itself.

The gradient of a step is the sum of its micro-batches' gradients. Autograd computes each one and adds it in another
kernel, which moves six bytes for each 2-byte parameter. Megatron-LM fuses the two with kernels of its own (Narayanan et
al. 2021, section 4.2). cuBLAS can do the same: `addmm` starts from the gradient so far. The result is then rounded to
the weights' precision once, where autograd rounds the micro-batch's gradient and then the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_parameters: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
"""Parameters by the address of their weights. Compiled code gets a weight as a plain tensor: only the address is left
to find the parameter, and its `grad`, with."""


def fuse_gradient_accumulation(layers: Iterable[nn.Module]) -> None:
    """Replace the linear modules of these layers; it takes effect for weights that `register_weight` has got."""
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Linear and module.weight.requires_grad:
                module.__class__ = _FusedLinear


def register_weight(parameter: nn.Parameter) -> None:
    """Record where a parameter's weights are. Call it again when they move, as at ZeRO stage 3 with each all-gather."""
    _parameters[parameter.data_ptr()] = parameter


class _FusedLinear(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            return super().forward(rows)
        bias: Tensor | None = self.bias
        product: Tensor = linear(rows.reshape(-1, self.in_features), self.weight)
        product = product.view(*rows.shape[:-1], self.out_features)
        return product if bias is None else product + bias


@torch.library.custom_op("spotune::linear", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows @ weight.T`, [rows, out]; a custom operator because of its backward pass."""
    return rows @ weight.T


@linear.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.size(0), weight.size(0))


@torch.library.custom_op("spotune::weight_gradient", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def weight_gradient(output_gradient: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `weight` in `rows @ weight.T`, plus the gradient accumulated in earlier micro-batches.

    The accumulated gradient is taken away from the parameter, because autograd next makes this result its gradient.
    """
    parameter = _parameters.get(weight.data_ptr())
    if parameter is None or parameter.data_ptr() != weight.data_ptr() or parameter.grad is None:
        return output_gradient.T @ rows
    total, parameter.grad = parameter.grad, None
    return torch.addmm(total, output_gradient.T, rows, out=total)


@weight_gradient.register_fake
def _(output_gradient: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    rows, weight = ctx.saved_tensors
    rows_gradient = output_gradient @ weight if ctx.needs_input_grad[0] else None
    return rows_gradient, weight_gradient(output_gradient, rows, weight) if ctx.needs_input_grad[1] else None


linear.register_autograd(_backward, setup_context=_save_for_backward)
