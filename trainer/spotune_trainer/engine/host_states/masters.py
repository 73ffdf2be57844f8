"""Masters of ZeRO stages 1 and 2 in host memory, while gradients and weights stay on the device.

DeepSpeed's own offload also moves gradients to the host, and steps there. So DeepSpeed is not told: it creates masters
on the meta device, which has no memory, and `move_masters_to_host` gives them memory on the host (DeepSpeed 0.19,
deepspeed/runtime/zero/stage_1_and_2.py):

    what DeepSpeed does in __init__              here
    -------------------------------------------  ----------------------------------------------------
    casts a copy of the partition to fp32 on     `device` is "meta" until __init__ has ended
      `self.device`
    initialize_optimizer_states: a gradient as   nothing: the gradient was removed at once
      large as the master, in fp32
    _link_all_hp_params: where in the masters    called again, for the new masters
      each parameter is
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import distributed

from spotune.plan.memory import STREAM_ELEMENTS
from spotune_trainer.engine.host_states.stream import StateStream
from spotune_trainer.models.patching import patched


class _ZeroWithoutMasters(DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """DeepSpeed's optimizer whose masters have no memory until `move_masters_to_host`."""

    is_created = False

    @property
    def device(self) -> Any:
        return self._compute_device if self.is_created else torch.device("meta")

    @device.setter
    def device(self, value: Any) -> None:
        self._compute_device = value

    def initialize_optimizer_states(self) -> None:
        """Nothing: `zero_state.create_states` creates them."""


@contextmanager
def masters_without_memory() -> Iterator[None]:
    """Within it `deepspeed.initialize` creates masters without memory, at stages 1 and 2."""
    with patched(deepspeed_engine, "DeepSpeedZeroOptimizer", _ZeroWithoutMasters):
        yield


@torch.no_grad()
def move_masters_to_host(engine: Any) -> None:
    """Give the masters memory on the host, with the model's weights as values.

    The optimizer gets the attribute `state_stream`, by which its step updates them.

    Args:
        engine: made within `masters_without_memory`, with AdamW or AdamW8bit, whose states do not exist yet.
    """
    zero, optimizer = engine.optimizer, engine.basic_optimizer
    zero.is_created = True
    stream = optimizer.state_stream = StateStream(torch.device(zero.device))
    for index in range(len(zero.bit16_groups_flat)):
        rank = distributed.get_rank(zero.real_dp_process_group[index])
        weights = zero.parallel_partitioned_bit16_groups[index][rank]
        master = stream.empty(weights.numel())
        for start in range(0, master.numel(), STREAM_ELEMENTS):
            elements = slice(start, start + STREAM_ELEMENTS)
            master[elements] = weights[elements].float()
        master.requires_grad_()
        zero.single_partition_of_fp32_groups[index] = master
        optimizer.param_groups[index]["params"] = [master]
    zero._link_all_hp_params()
