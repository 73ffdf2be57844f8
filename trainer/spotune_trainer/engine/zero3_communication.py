"""ZeRO stage 3 collectives without copies: weights are gathered, and gradients reduced, in the memory they are used in.

DeepSpeed all-gathers several parameters into one buffer and copies each of them out of it. It copies gradients into a
bucket, reorders the bucket by rank, divides it and only then reduces it. In every micro-batch these copies move several
times a layer's weights through memory, in competition with the matrix products. NCCL accepts several tensors in
one launch (a coalesced call), so no buffer is needed.

Two functions patch the objects of one engine. All that they replace in DeepSpeed 0.19 (deepspeed/runtime/zero/):

    what DeepSpeed calls                                called by, and when               replaced by
    --------------------------------------------------  --------------------------------  ----------------------------
    `install_zero_copy_collectives`:
    parameter.all_gather_coalesced                      PartitionedParameterCoordinator,  _fetch_parameters:
      (partition_parameters.py)                         to prefetch a module's weights    all-gather without a buffer
    parameter.all_gather                                DeepSpeedZeroOptimizer_Stage3,    _gather_now: the same,
      (partition_parameters.py)                         after a step or a restore         and wait for it
    DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads   __reduce_and_partition_ipg_grads, _average_gradients:
      (stage3.py)                                       once a bucket is full             no copy to a bucket

    `install_reduction_once_per_step`:
    .reduce_ready_partitions_and_remove_grads           the hook of a parameter, when     reduce_in_last_micro_batch:
      (stage3.py)                                       its gradient is complete          does nothing in other ones
    .independent_gradient_partition_epilogue            the end of a backward pass        reduce_remaining: those that
      (stage3.py)                                                                         got no gradient in this one

One private counter is changed, too: PartitionedParameterCoordinator.__n_available_params (see `_fetch_parameters`).
Hooks, prefetch order, streams and partitioning remain DeepSpeed's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import _coalescing_manager

from spotune_trainer.engine.compile.gradient_accumulation_fusion import register_weight

# Python mangles `self.__name` of a class to `self._Class__name`: an attribute set under the mangled name is found
# by the class's own calls.
_ALLGATHER_STREAM = "_PartitionedParameterCoordinator__allgather_stream"
_AVAILABLE_PARAMETERS = "_PartitionedParameterCoordinator__n_available_params"
_AVG_SCATTER_GRADS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"


def install_zero_copy_collectives(engine: Any) -> None:
    """Replace the collectives of an engine at stage 3; with one rank there are none, and nothing is replaced.

    The engine must have been built with `contiguous_gradients: false`, so that gradients are not copied to a bucket.
    """
    zero = engine.optimizer
    if distributed.get_world_size(zero.dp_process_group) == 1:
        return
    coordinator = zero.parameter_offload.get_param_coordinator()
    allgather_stream = getattr(coordinator, _ALLGATHER_STREAM)  # None on a device without streams
    for parameter in engine.module.parameters():
        parameter.all_gather_coalesced = partial(_fetch_parameters, coordinator)
        parameter.all_gather = partial(_gather_now, allgather_stream, parameter)
    setattr(zero, _AVG_SCATTER_GRADS, partial(_average_gradients, zero))


def install_reduction_once_per_step(zero: Any) -> None:
    """Accumulate whole gradients on every rank, and reduce them only in the last backward pass before a step.

    A parameter may get a gradient in an earlier micro-batch and none in the last one. It is reduced when the last
    backward pass ends.
    """
    reduce, finish_backward_pass = (
        zero.reduce_ready_partitions_and_remove_grads,
        zero.independent_gradient_partition_epilogue,
    )
    trained = [parameter for group in zero.fp16_groups for parameter in group if parameter.requires_grad]
    reduced_ids = set[int]()

    def reduce_in_last_micro_batch(parameter: Any) -> None:
        if zero.is_gradient_accumulation_boundary():
            zero.micro_step_id = 0  # DeepSpeed then stores this reduction instead of adding it to an earlier one
            reduced_ids.add(parameter.ds_id)
            reduce(parameter)

    def reduce_remaining() -> None:
        for parameter in trained:
            if parameter.ds_id not in reduced_ids and parameter.grad is not None:
                reduce_in_last_micro_batch(parameter)
        reduced_ids.clear()
        finish_backward_pass()

    zero.reduce_ready_partitions_and_remove_grads = reduce_in_last_micro_batch
    zero.independent_gradient_partition_epilogue = reduce_remaining


def keep_gathered(parameters: Iterable[Any]) -> None:
    """Keep these parameters whole on all ranks until the optimizer steps; the next forward pass gathers them again.

    `ds_persist` is DeepSpeed's mark of small parameters that it never partitions again between two steps.
    """
    for parameter in parameters:
        parameter.ds_persist = True


def _fetch_parameters(coordinator: Any, parameters: Iterable[Any], **options: Any) -> AllGatherHandle:
    """Replaces `parameter.all_gather_coalesced`.

    The coordinator has just added these parameters to `__n_available_params`, which limits how far it prefetches.
    It subtracts a parameter when it releases it, which it never does with one that stays gathered. Such parameters
    are therefore subtracted here: they would use up the limit.
    """
    parameters = list(parameters)
    persistent = sum(parameter.ds_numel for parameter in parameters if parameter.ds_persist)
    setattr(coordinator, _AVAILABLE_PARAMETERS, getattr(coordinator, _AVAILABLE_PARAMETERS) - persistent)
    return all_gather_parameters(parameters, **options)


def _gather_now(
    allgather_stream: Any, parameter: Any, param_list: Iterable[Any] | None = None, async_op: bool = False
) -> None:
    """Replaces `parameter.all_gather`: gather the parameter, or those of `param_list`, and wait."""
    assert not async_op, "the trainer uses nothing of DeepSpeed that sets async_op"
    parameters = [parameter] if param_list is None else param_list
    missing = [each for each in parameters if each.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    if missing:
        all_gather_parameters(missing).wait()
    if torch.cuda.is_available():  # the optimizer has just written the weights that this stream gathers next
        allgather_stream.wait_stream(torch.cuda.current_stream())


def _average_gradients(zero: Any, parameters: Sequence[Any], _dtype: torch.dtype) -> list[Tensor]:
    """Replaces `__avg_scatter_grads`: this rank's partition of the mean gradient of each parameter."""
    gradients = [parameter.grad for parameter in parameters]
    partitions = reduce_scatter_mean(gradients, parameters[0].ds_process_group)
    for gradient in gradients:
        # The backward pass allocated the gradient on its own stream, and this stream reads it. DeepSpeed records
        # that only for parameters of which this rank has a partition.
        if gradient.is_cuda:
            gradient.record_stream(torch.cuda.current_stream())
    return [partition.to(zero.gradient_accumulation_dtype) for partition in partitions]


@dataclass
class AllGatherHandle:
    """An all-gather in progress. DeepSpeed calls `wait` before it uses the parameters.

    Attributes:
        work: of torch.distributed.
        weights: each parameter with the memory that its elements are gathered into; empty once they have arrived.
    """

    work: Any
    weights: list[tuple[Any, Tensor]]

    def wait(self, handle_dependency: bool = True) -> None:
        """Let the current stream wait for the weights, and make them the data of their parameters."""
        del handle_dependency  # it concerns DeepSpeed's buffers, which do not exist here
        if self.weights:
            self.work.wait()
        for parameter, whole in self.weights:
            parameter.data = whole[: parameter.ds_numel].view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
            register_weight(parameter)
        self.weights = []


def all_gather_parameters(
    parameters: Iterable[Any], safe_mode: bool = False, quantize: bool = False
) -> AllGatherHandle:
    """Start to gather partitioned parameters; all ranks must pass the same ones, in any order.

    Each rank holds `ceil(n / world_size)` of a parameter's n elements.
    """
    assert not safe_mode, "the trainer never sets safe_mode"
    assert not quantize, "the trainer never sets zero_quantized_weights"
    ordered = sorted(parameters, key=lambda parameter: parameter.ds_id)
    group = ordered[0].ds_process_group
    world_size = distributed.get_world_size(group)
    device = get_accelerator().current_device_name()
    partitions, weights = list[Tensor](), list[tuple[Any, Tensor]]()
    for parameter in ordered:
        assert parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE, parameter.ds_summary()
        parameter.ds_status = ZeroParamStatus.INFLIGHT
        # With offloaded parameters this copies from page-locked host memory.
        partition = parameter.ds_tensor.data.to(device, non_blocking=True)
        partitions.append(partition)
        weights.append((parameter, _whole_buffer(parameter, partition.numel() * world_size, partition.dtype, device)))
    with _coalescing_manager(group, async_ops=True) as work:  # no return or raise within: it ends the NCCL group
        for partition, (_, whole) in zip(partitions, weights, strict=True):
            distributed.all_gather_into_tensor(whole, partition, group)
    return AllGatherHandle(work, weights)


def _whole_buffer(parameter: Any, elements: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Memory for a whole parameter; a parameter that stays gathered gets the same memory in every step.

    The host runs ahead of the device. Without reuse it would allocate the new memory before the old is free.
    """
    reused: Tensor | None = getattr(parameter, "spotune_whole_buffer", None)
    if reused is not None:
        return reused
    buffer = torch.empty(elements, dtype=dtype, device=device)
    if parameter.ds_persist:
        parameter.spotune_whole_buffer = buffer
    return buffer


def reduce_scatter_mean(gradients: Sequence[Tensor], group: Any) -> list[Tensor]:
    """This rank's partition of the mean of each gradient over the ranks.

    Args:
        gradients: of any shapes, the same on all ranks; float16 gradients are overwritten.
        group: process group of the ranks.

    Returns:
        For each gradient of n elements the rank-th `ceil(n / world_size)` of them, in one dimension, without padding;
        empty on a rank whose partition is padding alone.
    """
    world_size, rank = distributed.get_world_size(group), distributed.get_rank(group)
    flat = [gradient.reshape(-1) for gradient in gradients]
    if flat[0].dtype == torch.float16:  # the sum may overflow: divide first
        torch._foreach_div_(flat, world_size)
    padded = [_pad_to_multiple(each, world_size) for each in flat]
    partitions = [torch.empty(each.numel() // world_size, dtype=each.dtype, device=each.device) for each in padded]
    with _coalescing_manager(group, async_ops=True) as work:
        for partition, whole in zip(partitions, padded, strict=True):
            distributed.reduce_scatter_tensor(partition, whole, group=group)
    work.wait()
    if flat[0].dtype != torch.float16:
        torch._foreach_div_(partitions, world_size)
    return [
        partition[: max(0, each.numel() - rank * partition.numel())]
        for partition, each in zip(partitions, flat, strict=True)
    ]


def _pad_to_multiple(flat: Tensor, multiple: int) -> Tensor:
    padding = math.ceil(flat.numel() / multiple) * multiple - flat.numel()
    return torch.nn.functional.pad(flat, (0, padding)) if padding else flat
