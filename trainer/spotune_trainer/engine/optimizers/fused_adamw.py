"""One AdamW step of a flat master by PyTorch's fused kernel, without an fp32 copy of all gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spotune.plan.memory import STEP_ELEMENTS
from spotune_trainer.engine.optimizers.adamw8bit import MOMENTS
from spotune_trainer.engine.optimizers.master_optimizer import Gradients


@torch.no_grad()
def fused_adamw_step(
    group: Mapping[str, Any],
    state: Mapping[str, Tensor],
    master: Tensor,
    gradients: Gradients,
    clip: Tensor,
    found_inf: Tensor | None,
) -> None:
    """Update a master and its moments in place. Gradients are cast and clipped in chunks of `STEP_ELEMENTS`.

    Args:
        group: lr, betas, eps and weight_decay.
        state: step, exp_avg and exp_avg_sq of the master.
        master: fp32, of any shape.
        gradients: of its elements.
        clip: scalar that gradients are multiplied by.
        found_inf: if it is a scalar that is not zero, the step changes nothing.
    """
    beta1, beta2 = group["betas"]
    values, first_moment, second_moment = (each.view(-1) for each in (master.detach(), *(state[n] for n in MOMENTS)))
    # The kernel reads `step` and leaves it as it is: torch.optim.AdamW counts before it calls the kernel, too.
    step = state["step"]
    step += 1 if found_inf is None else 1 - found_inf
    for offset, gradient in gradients:
        for start in range(0, gradient.numel(), STEP_ELEMENTS):
            chunk = gradient[start : start + STEP_ELEMENTS].float().mul_(clip)
            elements = slice(offset + start, offset + start + chunk.numel())
            torch._fused_adamw_(
                [values[elements]],
                [chunk],
                [first_moment[elements]],
                [second_moment[elements]],
                max_exp_avg_sqs=[],
                state_steps=[step],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )
