"""An optimizer step without host synchronization: during the step the host never waits for a value from the GPU.

When the host waits, the GPU runs out of queued work and idles. DeepSpeed's ZeRO step waits several times:

    DeepSpeed                                                 here
    --------------------------------------------------------  ------------------------------------------------------
    the host waits for the last gradient reductions           the compute stream waits for the reduction stream
    checks each gradient for infinities, result to the host   the optimizer skips the step if the norm is not finite
    computes the norm of each gradient separately             one fused kernel for all norms (torch._foreach_norm)
    compares the norm with the limit on the host              the clip coefficient stays on the device
    copies the gradients to one fp32 tensor                   it reads them where they are (fused_step.py)

This holds for bfloat16 at ZeRO stages 1 to 3, unless the optimizer is offloaded. float16 keeps DeepSpeed's step,
because the host needs the overflow flag to adapt the loss scale. An offloaded optimizer steps on the host in any case.

`install_sync_free_step` patches the objects of one engine (DeepSpeed 0.19, deepspeed/runtime/zero/):

    what DeepSpeed calls                                  stage   replaced by
    ----------------------------------------------------  ------  ---------------------------------------------------
    zero.step                                             1 to 3  the step of fused_step.py
    zero.overlapping_partition_gradients_reduce_epilogue  1, 2    the same, but for `get_accelerator().synchronize()`
                                                                  within it: one stream waits for another
    zero.reduce_and_partition_stream.synchronize          3       likewise
    coordinator.fetch_sub_module                          3       the same, and `limit_run_ahead`
    zero.setup_buckets, .reduce_ipg_grads and             1, one  nothing: `fused_step.skip_gradient_reduction`
      .reduce_independent_p_g_buckets_and_remove_grads    rank
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
from spotune_trainer.engine.fused_step import (
    fused_step_at_stage_1_or_2,
    fused_step_at_stage_3,
    skip_gradient_reduction,
)
from spotune_trainer.engine.optimizers.adamw8bit import AdamW8bit
from spotune_trainer.engine.optimizers.master_optimizer import MasterOptimizer
from spotune_trainer.observability.own_time import stream_wait

_CLIP_EPSILON = 1e-6
_MAX_PARAMETERS_AHEAD = LIVE_PARAMETERS // 2
"""Gathered parameters of modules that the host has launched and the device has not computed: a few layers' worth."""


def install_sync_free_step(engine: Any) -> None:
    """Replace the engine's optimizer step where the precision and the offload allow it; see above.

    At stage 3 on GPUs the host's run-ahead is limited in any case.
    """
    optimizer = engine.basic_optimizer
    if engine.zero_optimization_stage() == 3 and torch.cuda.is_available():
        limit_run_ahead(engine.optimizer.parameter_offload.get_param_coordinator())
    if not engine.bfloat16_enabled() or not isinstance(optimizer, torch.optim.AdamW | AdamW8bit | MasterOptimizer):
        return
    if engine.zero_optimization_stage() == 3:
        if not engine.optimizer.offload_optimizer:
            _install_at_stage_3(engine.optimizer, optimizer)
    elif not engine.optimizer.cpu_offload:
        _install_at_stage_1_or_2(engine.optimizer, optimizer)


def _install_at_stage_1_or_2(zero: Any, optimizer: torch.optim.Optimizer) -> None:
    def step(closure: Any = None) -> None:
        fused_step_at_stage_1_or_2(zero, optimizer, _clip_coefficient(zero, optimizer))

    reduce_epilogue = zero.overlapping_partition_gradients_reduce_epilogue

    def reduce_epilogue_without_sync() -> None:
        with _stream_wait_for_synchronize(zero.reduction_stream):
            reduce_epilogue()

    if torch.cuda.is_available():
        zero.overlapping_partition_gradients_reduce_epilogue = reduce_epilogue_without_sync
    if distributed.get_world_size(zero.dp_process_group) == 1 and not zero.partition_gradients:
        skip_gradient_reduction(zero)
    zero.step = step


def _install_at_stage_3(zero: Any, optimizer: torch.optim.Optimizer) -> None:
    def step(closure: Any = None) -> None:
        zero._pre_step()
        zero._partition_all_parameters()
        clip = _clip_coefficient(zero, optimizer)
        zero.zero_grad(set_to_none=True)
        fused_step_at_stage_3(zero, optimizer, clip)
        zero._post_step(())

    reduction = zero.reduce_and_partition_stream
    if reduction is not None and torch.cuda.is_available():
        # DeepSpeed ends each backward pass with `reduce_and_partition_stream.synchronize()`.
        reduction.synchronize = lambda: stream_wait(reduction)
    zero.step = step


def limit_run_ahead(coordinator: Any) -> None:
    """Let the host launch modules only `_MAX_PARAMETERS_AHEAD` gathered parameters ahead of the device.

    A module's gathered weights and its whole gradients occupy memory until the device has computed the module. A
    module whose weights stay gathered counts as well, for its gradients. DeepSpeed's own limit does not help: it
    bounds how far the host is ahead of the all-gathers, and these do not wait for the computation.

    Args:
        coordinator: DeepSpeed's PartitionedParameterCoordinator; it calls `fetch_sub_module` before each module runs.
    """
    fetch_sub_module = coordinator.fetch_sub_module
    launched = deque[tuple[int, Any]]()  # (gathered parameters, event that the module's launch follows)
    sizes = dict[int, int]()

    def fetch_and_wait(module: Any, forward: bool) -> None:
        if module.ds_id not in sizes:
            is_layer = z3_leaf_module(module)
            parameters = iter_params(module, recurse=is_layer)
            sizes[module.ds_id] = sum(each.ds_numel for each in parameters if is_layer or not each.ds_persist)
        fetch_sub_module(module, forward)
        if sizes[module.ds_id]:
            launched.append((sizes[module.ds_id], torch.cuda.current_stream().record_event()))
        while len(launched) > 1 and sum(size for size, _ in launched) > _MAX_PARAMETERS_AHEAD:
            launched.popleft()[1].synchronize()

    coordinator.fetch_sub_module = fetch_and_wait


def skip_step_unless_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Make the optimizer's next step change nothing, not even its step count, if the gradient norm is not finite.

    `grad_scale` and `found_inf` are the attributes that torch.amp.GradScaler sets on a fused optimizer. Its kernel
    reads them on the device.
    """
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]


@contextmanager
def _stream_wait_for_synchronize(reduction: Any) -> Iterator[None]:
    """Within it `get_accelerator().synchronize()` makes the current stream wait for `reduction`; the host goes on.

    That is enough: the memory of reduced gradients is next used by this stream, and a stream runs in order.
    """
    accelerator = get_accelerator()  # one object a process: the attribute hides its method until it is deleted
    accelerator.synchronize = lambda *_: stream_wait(reduction)
    try:
        yield
    finally:
        del accelerator.synchronize


def _clip_coefficient(zero: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """Clip coefficient of the reduced gradients as a scalar on the device.

    It also makes the optimizer skip the step if the norm is not finite, and sets the attributes by which DeepSpeed
    reports the outcome of a step.
    """
    gradients = [each for group in zero.averaged_gradients.values() for each in group if not _is_padding(each)]
    norm = _global_norm(gradients, zero.dp_process_group, zero.device)
    skip_step_unless_finite(optimizer, norm)
    zero.overflow, zero._global_grad_norm = False, norm
    return clip_coefficient(norm, zero.clip_grad)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm), a scalar on the device; 1 if `max_norm` is 0."""
    return (max_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)


def _is_padding(gradient: Tensor) -> bool:
    """Whether DeepSpeed has appended this tensor to align a partition."""
    return getattr(gradient, "_zero_padding", False)


def _global_norm(gradients: Sequence[Tensor], group: Any, device: Any) -> Tensor:
    """L2 norm, in fp32, of the gradients of all ranks' partitions."""
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if gradients:
        squares = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32)).square().sum()
    distributed.all_reduce(squares, group=group)
    return squares.sqrt()
