"""One AdamW step of a flat master by PyTorch's fused kernel, without an fp32 copy of all gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from spotune.plan.memory import STEP_ELEMENTS
from spotune_trainer.engine.host_states.stream import StateStream
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
    stream: StateStream | None = None,
    weights: Tensor | None = None,
) -> None:
    """Update a master and its moments in place. Gradients are cast and clipped in chunks of `STEP_ELEMENTS`.

    Args:
        group: lr, betas, eps and weight_decay.
        state: step, exp_avg and exp_avg_sq of the master.
        master: fp32, of any shape.
        gradients: of its elements.
        clip: scalar that gradients are multiplied by.
        found_inf: if it is a scalar that is not zero, the step changes nothing.
        stream: moves master and moments, which are in host memory, piece by piece.
        weights: with a stream, the low-precision copy of the master, which is written as well. One dimension.
    """
    beta1, beta2 = group["betas"]
    values, first_moment, second_moment = (each.view(-1) for each in (master.detach(), *(state[n] for n in MOMENTS)))
    # The kernel reads `step` and leaves it as it is: torch.optim.AdamW counts before it calls the kernel, too.
    step = state["step"]
    step += 1 if found_inf is None else 1 - found_inf
    most_elements = STEP_ELEMENTS if stream is None else stream.piece_elements
    for offset, gradient in gradients:
        for start in range(0, gradient.numel(), most_elements):
            chunk = gradient[start : start + most_elements].float().mul_(clip)
            elements = slice(offset + start, offset + start + chunk.numel())
            states = [values[elements], first_moment[elements], second_moment[elements]]
            with nullcontext(states) if stream is None else stream.on_device(states) as (value, first, second):
                torch._fused_adamw_(
                    [value],
                    [chunk],
                    [first],
                    [second],
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
                if weights is not None:
                    weights[elements].copy_(value)
