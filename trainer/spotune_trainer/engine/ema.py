"""The exponential moving average (EMA) of the weights, `training.emaDecay`.

After each optimizer step: ema = decay ema + (1 - decay) weight, in fp32, for each master where it is. So the average is
sharded and saved as the masters are. A step that the optimizer has skipped changes no average.

The decay rises with the number of steps: min(decay, (1 + step) / (10 + step)), as in tf.train.ExponentialMovingAverage
with `num_updates`. The weights before training then have no part in the average of a short run.
"""

from __future__ import annotations

from typing import Any

import torch

from spotune_trainer.checkpoint.fragment import EMA
from spotune_trainer.engine.zero_state import EMA_STEP, basic_optimizer, masters_of


def create_ema(engine: Any) -> None:
    """Start the average of every master with its present values. The optimizer's states must exist."""
    states = basic_optimizer(engine).state
    for master in masters_of(engine):
        states[master][EMA] = master.detach().clone()
        states[master][EMA_STEP] = torch.zeros((), dtype=torch.float32, device=master.device)


@torch.no_grad()
def update_ema(engine: Any, decay: float) -> None:
    """Update the averages after an optimizer step. The host does not wait for the device.

    Args:
        engine: its averages were created.
        decay: `training.emaDecay`.
    """
    states = basic_optimizer(engine).state
    for master in masters_of(engine):
        state = states[master]
        step, previous = state["step"].to(master.device), state[EMA_STEP]
        share = (step - previous) * (1 - ((1 + step) / (10 + step)).clamp(max=decay))
        state[EMA].lerp_(master.detach(), share)
        previous.copy_(step)
