"""Schedule-free AdamW (Defazio et al. 2024, "The Road Less Scheduled", arXiv:2405.15682).

Three sequences of weights replace a learning rate schedule that falls to zero:

    z   the base: takes the gradient steps
    x   the average of all z so far: what is evaluated and exported
    y   (1 - beta1) z + beta1 x: where gradients are computed, so the weights of the model while it trains

Masters hold y, the state holds z, and x follows from both (`checkpoint.reader.schedule_free_average`). The arithmetic
is that of schedulefree.AdamWScheduleFree (facebookresearch/schedule_free, version 1.4). That class keeps its counters
on the host and changes gradients in place. Here the counters are on the device, so that a step with a nonfinite
gradient skips itself, and the update goes in chunks over gradients wherever they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spotune_trainer.checkpoint.fragment import SCHEDULE_FREE_BASE
from spotune_trainer.engine.optimizers.master_optimizer import Gradients, MasterOptimizer, MasterSlice, write_unless

_CHUNK_ELEMENTS = 1 << 22
"""Elements that are updated at once; it takes about 100 MiB of temporary memory."""
_LEARNING_RATE_POWER = 2.0
"""Power of the largest learning rate so far that weights a step in the average: `weight_lr_power` of schedulefree."""


class ScheduleFreeAdamW(MasterOptimizer):
    """Schedule-free AdamW; groups have lr, betas, eps and weight_decay."""

    def _initial_state(self, master: Tensor) -> dict[str, Any]:
        scalars = {name: torch.zeros((), dtype=torch.float64, device=master.device) for name in self.scalars}
        second_moment = torch.zeros_like(master, memory_format=torch.preserve_format)
        return {**scalars, SCHEDULE_FREE_BASE: master.detach().clone(), "exp_avg_sq": second_moment}

    @property
    def scalars(self) -> tuple[str, ...]:
        """Sum of the weights of all steps in the average, and the largest learning rate so far; both fp64."""
        return ("weight_sum", "lr_max")

    def elementwise_states(self, piece: MasterSlice) -> Mapping[str, Tensor]:
        """The base and the second moment."""
        state = self.create_state(piece.master)
        return {name: piece.of(state[name]) for name in (SCHEDULE_FREE_BASE, "exp_avg_sq")}

    @torch.no_grad()
    def update(self, group: Mapping[str, Any], master: Tensor, gradients: Gradients, clip: Tensor) -> None:
        """Update y, z and the second moment of one master; see `MasterOptimizer.update`."""
        state = self.create_state(master)
        factors, is_skipped = self._step_factors(group, master)
        y, z, second = (each.view(-1) for each in (master.detach(), state[SCHEDULE_FREE_BASE], state["exp_avg_sq"]))
        for offset, gradient in gradients:
            for start in range(0, gradient.numel(), _CHUNK_ELEMENTS):
                chunk = gradient[start : start + _CHUNK_ELEMENTS].float() * clip
                elements = slice(offset + start, offset + start + chunk.numel())
                old = (y[elements], z[elements], second[elements])
                write_unless(is_skipped, old, _updated(*old, chunk, factors))

    def _step_factors(self, group: Mapping[str, Any], master: Tensor) -> tuple[Tensor, Tensor]:
        """The scalars of a step in the order in which `_updated` unpacks them, fp32 [7]; and whether it is skipped."""
        state, rate, (beta1, beta2) = self.state[master], float(group["lr"]), group["betas"]
        step, is_skipped = self.count_step(master)
        rate_max = state["lr_max"].clamp(min=rate)
        weight = rate_max**_LEARNING_RATE_POWER
        weight_sum = state["weight_sum"] + weight
        # The first step of a warm-up has learning rate 0: all weights are 0, and the average does not change.
        share = torch.where(weight_sum > 0, weight / weight_sum, 0.0)
        write_unless(is_skipped, (state["lr_max"], state["weight_sum"]), (rate_max, weight_sum))
        factors = (share, rate * (beta1 * (1 - share) - 1), rate, beta2, 1 - beta2**step, group["eps"])
        scalars = [torch.zeros_like(step) + each for each in (*factors, group["weight_decay"])]
        return torch.stack(scalars).float(), is_skipped


def _updated(y: Tensor, z: Tensor, second: Tensor, gradient: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, z and the second moment after a step (algorithm 1 of the paper, in the form without x)."""
    share, rate_of_y, rate, beta2, correction, epsilon, decay = factors.unbind()
    second = second * beta2 + (1 - beta2) * gradient.square()
    direction = gradient / ((second / correction).sqrt() + epsilon) + decay * y
    return torch.lerp(y, z, share) + rate_of_y * direction, z - rate * direction, second
