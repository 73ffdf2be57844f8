"""Optimizer steps at ZeRO 1 to 3 that take gradients from where they were reduced to.

DeepSpeed makes one tensor of a rank's gradients, another one of that in fp32, and multiplies it by what clips it: six
bytes for each parameter of the rank's part, and as much memory traffic as the update itself has. Here AdamW is given
the gradients piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.utils import all_gather_dp_groups
from torch import Tensor, distributed

from spotune.plan.memory import STEP_ELEMENTS
from spotune_trainer.engine.adamw import MOMENTS, AdamW8bit


def step_in_place(zero: Any, adam: torch.optim.Optimizer, clip: Tensor) -> None:
    """Update a rank's masters, and with them the weights of all ranks; its gradients are gone then.

    Args:
        zero: DeepSpeed's optimizer around `adam` at stage 1 or 2, without offload, in bfloat16.
        adam: a fused AdamW or one with 8-bit moments; `found_inf` says whether it is to leave this step out.
        clip: what gradients are multiplied by.
    """
    for index, master in enumerate(zero.single_partition_of_fp32_groups):
        _update(adam, adam.param_groups[index], master, zero.averaged_gradients[index], clip)
        zero.free_grad_in_param_list(zero.bit16_groups[index])
        zero.averaged_gradients[index] = zero.all_grad_tensors[index] = None
        own = distributed.get_rank(zero.real_dp_process_group[index])
        zero.parallel_partitioned_bit16_groups[index][own].data.copy_(master.data)
    zero._lazy_init_hp_params_optimizer_state()
    all_gather_dp_groups(
        groups_flat=zero.bit16_groups_flat,
        partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
        dp_process_group=zero.real_dp_process_group,
        start_alignment_factor=zero.nccl_start_alignment_factor,
        allgather_bucket_size=zero.allgather_bucket_size,
    )
    for index in range(len(zero.bit16_groups)):
        zero._update_model_bit16_weights(index)


def step_parts_in_place(zero: Any, adam: torch.optim.Optimizer, clip: Tensor) -> None:
    """Update a rank's masters and its part of the weights at stage 3; arguments as those of `step_in_place`."""
    for index, master in enumerate(zero.fp32_partitioned_groups_flat):
        group = adam.param_groups[zero.sub_group_to_group_id[index]]
        _update(adam, group, master, zero.averaged_gradients[index], clip)
        zero.averaged_gradients[index] = None
        zero._reassign_or_swap_out_partitioned_parameters(index)


def reduce_nothing(zero: Any) -> None:
    """On a single rank at stage 1, leave gradients where the backward pass has put them: they are the mean."""
    zero.setup_buckets = lambda: None
    zero.reduce_independent_p_g_buckets_and_remove_grads = lambda parameter, group: None
    zero.reduce_ipg_grads = lambda: None


@torch.no_grad()
def _update(
    adam: torch.optim.Optimizer, group: dict[str, Any], master: Tensor, gradients: Sequence[Tensor], clip: Tensor
) -> None:
    """Step one tensor, whose elements' gradients are those of `gradients`, one after the other."""
    if isinstance(adam, AdamW8bit):
        adam.update(group, master, _placed(gradients), clip)
        return
    state, found_inf = adam.state[master], getattr(adam, "found_inf", None)
    (beta1, beta2), (first_moment, second_moment) = group["betas"], (state[name] for name in MOMENTS)
    state["step"] += 1 if found_inf is None else 1 - found_inf
    for start, gradient in _placed(gradients):
        for first in range(0, gradient.numel(), STEP_ELEMENTS):
            slope = gradient[first : first + STEP_ELEMENTS].float().mul_(clip)
            within = slice(start + first, start + first + slope.numel())
            torch._fused_adamw_(
                [master.detach()[within]],
                [slope],
                [first_moment[within]],
                [second_moment[within]],
                max_exp_avg_sqs=[],
                state_steps=[state["step"]],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )


def _placed(gradients: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Each gradient in one dimension, with its first element's place."""
    start = 0
    for gradient in gradients:
        yield start, gradient.contiguous().view(-1)
        start += gradient.numel()
