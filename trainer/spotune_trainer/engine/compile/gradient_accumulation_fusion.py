"""Gradient accumulation fusion: weight gradients are added up by the multiplication that computes them.

A step's gradient is the sum of those of its micro-batches. Autograd computes each and then adds it to what there is:
six bytes of memory traffic for every parameter in two bytes, after a multiplication that could have begun with the sum
as it is. Megatron-LM has fused the two by kernels of its own (Narayanan et al. 2021, section 4.2); cuBLAS takes a sum
to add to, too. What is rounded to the weights' precision is then the new sum, and not also the part that is new.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_owners: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
"""By the address of their weights: all that compiled code still knows of a parameter."""


def add_up_in_products(layers: Iterable[nn.Module]) -> None:
    """Let linear modules of these layers compute their weights' gradients so, where they are registered."""
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Linear and module.weight.requires_grad:
                module.__class__ = _Linear


def register_weight(parameter: nn.Parameter) -> None:
    """Say whose weights lie where this parameter's do from now on; gradients add up in its `grad`."""
    _owners[parameter.data_ptr()] = parameter


class _Linear(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            return super().forward(rows)
        bias: Tensor | None = self.bias
        product: Tensor = linear(rows.reshape(-1, self.in_features), self.weight)
        product = product.view(*rows.shape[:-1], self.out_features)
        return product if bias is None else product + bias


@torch.library.custom_op("spotune::linear", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """A matrix product with `weight.T`; an operation of our own for the sake of its backward pass."""
    return rows @ weight.T


@linear.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.size(0), weight.size(0))


@torch.library.custom_op("spotune::weight_gradient", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def weight_gradient(of_output: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `weight` in `rows @ weight.T`, with what it has come to in earlier micro-batches.

    That is then the parameter's no longer: autograd is about to make this result its gradient.
    """
    parameter = _owners.get(weight.data_ptr())
    if parameter is None or parameter.data_ptr() != weight.data_ptr() or parameter.grad is None:
        return of_output.T @ rows
    total, parameter.grad = parameter.grad, None
    return torch.addmm(total, of_output.T, rows, out=total)


@weight_gradient.register_fake
def _(of_output: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, of_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
    rows, weight = ctx.saved_tensors
    of_rows = of_output @ weight if ctx.needs_input_grad[0] else None
    return of_rows, weight_gradient(of_output, rows, weight) if ctx.needs_input_grad[1] else None


linear.register_autograd(_backward, setup_context=_remember)
