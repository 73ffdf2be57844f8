"""Optimizer steps at ZeRO stages 1 to 3 without an fp32 copy of the gradients.

DeepSpeed concatenates the gradients of a rank's partition, casts the result to fp32 and multiplies it by the clip
coefficient. The copies take six bytes for each parameter of the partition, and as much memory traffic as the update
itself. Here the optimizer gets each reduced gradient where it is. AdamW casts and clips it in chunks, so only one chunk
exists in fp32.

`zero` is DeepSpeed's ZeRO optimizer. What its attributes hold at each stage is in zero_state.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.utils import all_gather_dp_groups
from torch import Tensor, distributed

from spotune_trainer.engine.host_states.stream import stream_of
from spotune_trainer.engine.optimizers.adamw8bit import AdamW8bit
from spotune_trainer.engine.optimizers.fused_adamw import fused_adamw_step
from spotune_trainer.engine.optimizers.master_optimizer import MasterOptimizer


def fused_step_at_stage_1_or_2(
    zero: Any,
    optimizer: torch.optim.Optimizer,
    clip: Tensor,
    adamw_step: Callable[..., None] = fused_adamw_step,
) -> None:
    """Update this rank's fp32 masters, gather the new weights of all ranks, and free the gradients.

    Does what DeepSpeedZeroOptimizer.step does in stage_1_and_2.py (DeepSpeed 0.19), in the same order.

    Args:
        zero: DeepSpeed's optimizer around `optimizer` at stage 1 or 2, in bfloat16. Masters may be in host memory.
        optimizer: AdamW, AdamW8bit or a MasterOptimizer; it skips the step if its `found_inf` is not zero.
        clip: scalar that gradients are multiplied by.
        adamw_step: one step of torch.optim.AdamW; it has the arguments of `fused_adamw_step`.
    """
    stream = stream_of(optimizer)
    with nullcontext() if stream is None else stream.step():
        for index, master in enumerate(zero.single_partition_of_fp32_groups):
            group, gradients = optimizer.param_groups[index], zero.averaged_gradients[index]
            rank = distributed.get_rank(zero.real_dp_process_group[index])
            weights = zero.parallel_partitioned_bit16_groups[index][rank].data
            if stream is None:
                _update_master(optimizer, group, master, gradients, clip, adamw_step)
            else:
                _update_master_on_host(optimizer, group, master, gradients, clip, weights)
            zero.free_grad_in_param_list(zero.bit16_groups[index])
            zero.averaged_gradients[index] = zero.all_grad_tensors[index] = None
            if stream is None:
                weights.copy_(master.data)
    zero._lazy_init_hp_params_optimizer_state()
    gather_weights(zero)
    for index in range(len(zero.bit16_groups)):
        zero._update_model_bit16_weights(index)


def gather_weights(zero: Any) -> None:
    """At stages 1 and 2: all-gather the weights, of which each rank has written its partition."""
    all_gather_dp_groups(
        groups_flat=zero.bit16_groups_flat,
        partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
        dp_process_group=zero.real_dp_process_group,
        start_alignment_factor=zero.nccl_start_alignment_factor,
        allgather_bucket_size=zero.allgather_bucket_size,
    )


def fused_step_at_stage_3(zero: Any, optimizer: torch.optim.Optimizer, clip: Tensor) -> None:
    """Update this rank's fp32 masters and its partition of the weights; the arguments are those of stages 1 and 2."""
    for index, master in enumerate(zero.fp32_partitioned_groups_flat):
        group = optimizer.param_groups[zero.sub_group_to_group_id[index]]
        _update_master(optimizer, group, master, zero.averaged_gradients[index], clip, fused_adamw_step)
        zero.averaged_gradients[index] = None
        zero._reassign_or_swap_out_partitioned_parameters(index)


def skip_gradient_reduction(zero: Any) -> None:
    """Make stage 1 on one rank leave gradients where the backward pass has put them: they are the mean already.

    DeepSpeed would copy each of them into a reduction bucket and back. The three methods that do this are replaced.
    """
    zero.setup_buckets = lambda: None
    zero.reduce_independent_p_g_buckets_and_remove_grads = lambda parameter, group: None
    zero.reduce_ipg_grads = lambda: None


def _update_master(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    master: Tensor,
    gradients: Sequence[Tensor],
    clip: Tensor,
    adamw_step: Callable[..., None],
) -> None:
    """One optimizer step of a flat master tensor; the concatenated `gradients` are its gradient."""
    if isinstance(optimizer, AdamW8bit | MasterOptimizer):
        optimizer.update(group, master, _with_offsets(gradients), clip)
        return
    found_inf = getattr(optimizer, "found_inf", None)
    adamw_step(group, optimizer.state[master], master, _with_offsets(gradients), clip, found_inf)


def _update_master_on_host(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    master: Tensor,
    gradients: Sequence[Tensor],
    clip: Tensor,
    weights: Tensor,
) -> None:
    """The same for a master in host memory; it also writes the weights."""
    if isinstance(optimizer, AdamW8bit):
        optimizer.update(group, master, _with_offsets(gradients), clip, weights)
        return
    adamw_step = partial(fused_adamw_step, stream=stream_of(optimizer), weights=weights)
    _update_master(optimizer, group, master, gradients, clip, adamw_step)


def _with_offsets(gradients: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Each gradient in one dimension, with the offset of its first element in their concatenation."""
    offset = 0
    for gradient in gradients:
        yield offset, gradient.contiguous().view(-1)
        offset += gradient.numel()
