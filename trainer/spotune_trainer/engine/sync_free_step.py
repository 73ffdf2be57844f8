"""Backward passes and optimizer steps at ZeRO 1 to 3 during which the host waits for nothing of the device.

DeepSpeed waits for the last gradients to be reduced (at stage 3 in every micro-batch), looks at each in turn for
infinities, computes every norm by itself and asks the device for the outcome three times, while the device has nothing
to do. Here the device's streams wait for each other, the norm of all gradients is one operation, clipping is arithmetic
on the device, and a gradient that is not finite is what the fused AdamW leaves out by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module
from torch import Tensor, distributed

from spotune.plan.memory import LIVE_PARAMETERS
from spotune_trainer.engine.adamw import AdamW8bit
from spotune_trainer.engine.fused_step import reduce_nothing, step_in_place, step_parts_in_place

_CLIP_EPSILON = 1e-6
_PARAMETERS_AHEAD = LIVE_PARAMETERS // 2
"""Gathered for what the host has launched and the device has not begun: enough for some layers."""


def step_on_device(engine: Any) -> None:
    """Make an engine's steps such ones; others (float16, offload) stay as DeepSpeed takes them.

    At stage 3 the host is kept near the device in all of them.
    """
    adam = engine.basic_optimizer
    if engine.zero_optimization_stage() == 3 and torch.cuda.is_available():
        keep_near_the_device(engine.optimizer.parameter_offload.get_param_coordinator())
    if not engine.bfloat16_enabled() or not isinstance(adam, torch.optim.AdamW | AdamW8bit):
        return
    if engine.zero_optimization_stage() == 3:
        if not engine.optimizer.offload_optimizer:
            _step_at_stage_3(engine.optimizer, adam)
    elif not engine.optimizer.cpu_offload:
        _step_at_stage_1_or_2(engine.optimizer, adam)


def _step_at_stage_1_or_2(zero: Any, adam: torch.optim.Optimizer) -> None:
    def step(closure: Any = None) -> None:
        step_in_place(zero, adam, _clip(zero, adam))

    reduce_last = zero.overlapping_partition_gradients_reduce_epilogue

    def reduce_last_gradients() -> None:
        with _streams_wait(zero.reduction_stream):
            reduce_last()

    if torch.cuda.is_available():
        zero.overlapping_partition_gradients_reduce_epilogue = reduce_last_gradients
    if distributed.get_world_size(zero.dp_process_group) == 1 and not zero.partition_gradients:
        reduce_nothing(zero)
    zero.step = step


def _step_at_stage_3(zero: Any, adam: torch.optim.Optimizer) -> None:
    def step(closure: Any = None) -> None:
        zero._pre_step()
        zero._partition_all_parameters()
        clip = _clip(zero, adam)
        zero.zero_grad(set_to_none=True)
        step_parts_in_place(zero, adam, clip)
        zero._post_step(())

    reduction = zero.reduce_and_partition_stream
    if reduction is not None and torch.cuda.is_available():
        reduction.synchronize = lambda: torch.cuda.current_stream().wait_stream(reduction)
    zero.step = step


def keep_near_the_device(coordinator: Any) -> None:
    """Let the host launch modules only so far ahead of what the device computes.

    The weights that are gathered for a module, and gradients that are reduced, can be forgotten once the device has
    computed it: what stays gathered counts for the sake of those. DeepSpeed's own limit is on how far the host is ahead
    of gathering, which waits for nothing.
    """
    fetch, ahead, sizes = coordinator.fetch_sub_module, deque[tuple[int, Any]](), dict[int, int]()

    def fetch_and_wait(module: Any, forward: bool) -> None:
        if module.ds_id not in sizes:
            is_layer = z3_leaf_module(module)
            fetched = iter_params(module, recurse=is_layer)
            sizes[module.ds_id] = sum(each.ds_numel for each in fetched if is_layer or not each.ds_persist)
        fetch(module, forward)
        if sizes[module.ds_id]:
            ahead.append((sizes[module.ds_id], torch.cuda.current_stream().record_event()))
        while len(ahead) > 1 and sum(size for size, _ in ahead) > _PARAMETERS_AHEAD:
            ahead.popleft()[1].synchronize()

    coordinator.fetch_sub_module = fetch_and_wait


def leave_out_unless_finite(adam: torch.optim.Optimizer, norm: Tensor) -> None:
    """Have AdamW's next step change nothing, its count neither, if the norm of the gradient is not finite.

    These are the attributes that torch.amp.GradScaler sets; the kernel reads them on the device.
    """
    adam.grad_scale = None  # type: ignore[attr-defined]
    adam.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]


@contextmanager
def _streams_wait(reduction: Any) -> Iterator[None]:
    """Where DeepSpeed would have the host wait for the device, let what is computed next wait for what is reduced.

    The memory of reduced gradients is used again by the stream that then waits, in its order.
    """
    accelerator = get_accelerator()
    accelerator.synchronize = lambda *_: torch.cuda.current_stream().wait_stream(reduction)
    try:
        yield
    finally:
        del accelerator.synchronize


def _is_padding(gradient: Tensor) -> bool:
    """Whether DeepSpeed has put it there for the sake of alignment."""
    return getattr(gradient, "_zero_padding", False)


def _clip(zero: Any, adam: torch.optim.Optimizer) -> Tensor:
    """What the reduced gradients are multiplied by; AdamW leaves the step out unless their norm is finite."""
    gradients = [each for group in zero.averaged_gradients.values() for each in group if not _is_padding(each)]
    norm = _norm(gradients, zero.dp_process_group, zero.device)
    leave_out_unless_finite(adam, norm)
    zero.overflow, zero._global_grad_norm = False, norm
    return (zero.clip_grad / (norm + _CLIP_EPSILON)).clamp(max=1.0) if zero.clip_grad > 0 else torch.ones_like(norm)


def _norm(gradients: Sequence[Tensor], group: Any, device: Any) -> Tensor:
    """L2 norm of the gradients of all ranks' parts, in fp32."""
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if gradients:
        squares = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32)).square().sum()
    distributed.all_reduce(squares, group=group)
    return squares.sqrt()
