"""Optimizer steps at ZeRO 1 and 2 during which the host waits for nothing of the device.

DeepSpeed waits for the last gradients to be reduced, looks at each in turn for infinities, computes every norm by
itself and asks the device for the outcome three times, while the device has nothing to do. Here the device's streams
wait for each other, the norm of all gradients is one operation, clipping is arithmetic on the device, and a gradient
that is not finite is what the fused AdamW leaves out by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed

_DEEPSPEED_STAGES = (1, 2)
_CLIP_EPSILON = 1e-6


def step_on_device(engine: Any) -> None:
    """Make an engine's steps such ones; others (float16, 8-bit moments, offload) stay as DeepSpeed takes them."""
    adam = engine.basic_optimizer
    if engine.zero_optimization_stage() not in _DEEPSPEED_STAGES or not engine.bfloat16_enabled():
        return
    if not isinstance(adam, torch.optim.AdamW) or engine.optimizer.cpu_offload:
        return
    zero = engine.optimizer
    zero.check_grad_overflow = False

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        assert norm_type == 2, "the norm that is clipped to"
        gradients = [each for group in zero.averaged_gradients.values() for each in group if not _is_padding(each)]
        norm = _norm(gradients, zero.dp_process_group, zero.device)
        leave_out_unless_finite(adam, norm)
        return norm

    def unscale_and_clip_grads(gradients: Sequence[Tensor], total_norm: Tensor) -> None:
        if zero.clip_grad > 0:
            factor = (zero.clip_grad / (total_norm + _CLIP_EPSILON)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor)

    reduce_last = zero.overlapping_partition_gradients_reduce_epilogue

    def reduce_last_gradients() -> None:
        with _streams_wait(zero.reduction_stream):
            reduce_last()

    if torch.cuda.is_available():
        zero.overlapping_partition_gradients_reduce_epilogue = reduce_last_gradients
    zero.scaled_global_norm = scaled_global_norm
    zero.unscale_and_clip_grads = unscale_and_clip_grads


def leave_out_unless_finite(adam: torch.optim.Optimizer, norm: Tensor) -> None:
    """Have the fused AdamW's next step change nothing, its count neither, if the norm of the gradient is not finite.

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


def _norm(gradients: Sequence[Tensor], group: Any, device: Any) -> Tensor:
    """L2 norm of the gradients of all ranks' parts, in fp32."""
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if gradients:
        squares = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32)).square().sum()
    distributed.all_reduce(squares, group=group)
    return squares.sqrt()
