"""AdamW (Loshchilov and Hutter 2019, algorithm 2) whose result for an element does not depend on its place in a tensor.

It uses additions, products, divisions and square roots only. IEEE 754 defines their result to the last bit, for each
element by itself. PyTorch's fused kernel on CPUs updates the last elements of a tensor by other code than those that
fill a vector, and rounds them differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spotune.plan.memory import FIXED_POINT_ELEMENTS
from spotune_trainer.engine.optimizers.adamw8bit import MOMENTS
from spotune_trainer.engine.optimizers.master_optimizer import Gradients

CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": FIXED_POINT_ELEMENTS}
"""Elements converted or updated at once: what fits the cache of a CPU, or limits the temporary memory of a GPU."""


@torch.no_grad()
def elementwise_adamw_step(
    group: Mapping[str, Any],
    state: Mapping[str, Tensor],
    master: Tensor,
    gradients: Gradients,
    factor: Tensor,
    found_inf: Tensor | None,
) -> None:
    """Update a master and its moments in place. The host waits for `found_inf`.

    Args:
        group: lr, betas, eps and weight_decay.
        state: step, exp_avg and exp_avg_sq of the master.
        master: fp32, of any shape.
        gradients: of its elements, floating-point numbers or integers.
        factor: scalar that gradients are multiplied by.
        found_inf: if it is a scalar that is not zero, the step changes nothing.
    """
    if found_inf is not None and bool(found_inf):
        return
    beta1, beta2 = group["betas"]
    state["step"].add_(1)
    step = state["step"].double()
    rate = group["lr"] / (1 - beta1**step)
    correction = 1 - beta2**step
    whole = [each.view(-1) for each in (master.detach(), *(state[name] for name in MOMENTS))]
    chunk = CHUNK_ELEMENTS[master.device.type]
    for offset, gradient in gradients:
        for start in range(0, gradient.numel(), chunk):
            part = gradient[start : start + chunk].float().mul_(factor)
            values, first, second = (each[offset + start :][: part.numel()] for each in whole)
            first.mul_(beta1).add_(part * (1 - beta1))
            second.mul_(beta2).add_(part.square_().mul_(1 - beta2))
            denominator = second.div(correction).sqrt_().add_(group["eps"])
            values.mul_(1 - group["lr"] * group["weight_decay"])
            values.sub_(first.div(denominator.div_(rate)))
