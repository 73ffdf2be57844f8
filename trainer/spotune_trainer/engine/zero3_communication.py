"""Weights gathered and gradients reduced without copies at ZeRO 3.

DeepSpeed gathers several parameters through a buffer and copies each out of it, and copies gradients into a bucket,
from there into the order of the ranks, and divides them, before they are reduced: memory traffic of several times the
layer's weights in every micro-batch, beside the multiplications that want the same memory. NCCL takes several tensors
in one launch, each of which can lie where it is wanted.
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


def communicate_in_place(engine: Any) -> None:
    """Make an engine at stage 3 gather and reduce so; it must have been made without `contiguous_gradients`."""
    zero = engine.optimizer
    if distributed.get_world_size(zero.dp_process_group) == 1:
        return
    coordinator = zero.parameter_offload.get_param_coordinator()
    # None where a device has no streams.
    fetching = coordinator._PartitionedParameterCoordinator__allgather_stream

    def fetch(parameters: Iterable[Any], **options: Any) -> Gathering:
        """For the coordinator, which only goes so far ahead: what stays gathered is not to count as ahead."""
        wanted = list(parameters)
        staying = sum(parameter.ds_numel for parameter in wanted if parameter.ds_persist)
        coordinator._PartitionedParameterCoordinator__n_available_params -= staying
        return gather(wanted, **options)

    def all_gather(parameter: Any, param_list: Iterable[Any] | None = None, async_op: bool = False) -> None:
        """After a step or a restore; what is fetched next is to find the new weights as well."""
        assert not async_op, "nothing asks for it"
        wanted = [parameter] if param_list is None else param_list
        missing = [each for each in wanted if each.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            gather(missing).wait()
        if torch.cuda.is_available():
            fetching.wait_stream(torch.cuda.current_stream())

    for parameter in engine.module.parameters():
        parameter.all_gather_coalesced = fetch
        parameter.all_gather = partial(all_gather, parameter)

    def average(parameters: Sequence[Any], _dtype: torch.dtype) -> list[Tensor]:
        gradients = [parameter.grad for parameter in parameters]
        own = reduce_scatter_mean(gradients, parameters[0].ds_process_group)
        for gradient in gradients:  # of the backward pass's stream, which DeepSpeed forgets where this part is empty
            if gradient.is_cuda:
                gradient.record_stream(torch.cuda.current_stream())
        return [each.to(zero.gradient_accumulation_dtype) for each in own]

    # Looked up by its mangled name wherever the class calls its private method.
    zero._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = average


def keep_gathered(parameters: Iterable[Any]) -> None:
    """Have all ranks hold these parameters whole until the optimizer steps: the first pass after it gathers them."""
    for parameter in parameters:
        parameter.ds_persist = True


def reduce_once(zero: Any) -> None:
    """Add gradients up whole on every rank, and reduce them in the last backward pass before a step only.

    What takes no part in that pass, but did so before, is reduced at its end.
    """
    reduce, end_pass = zero.reduce_ready_partitions_and_remove_grads, zero.independent_gradient_partition_epilogue
    trained = [parameter for group in zero.fp16_groups for parameter in group if parameter.requires_grad]
    reduced = set[int]()

    def reduce_in_the_last_pass(parameter: Any) -> None:
        if zero.is_gradient_accumulation_boundary():
            zero.micro_step_id = 0  # there is nothing to add to
            reduced.add(parameter.ds_id)
            reduce(parameter)

    def reduce_what_is_left() -> None:
        for parameter in trained:
            if parameter.ds_id not in reduced and parameter.grad is not None:
                reduce_in_the_last_pass(parameter)
        reduced.clear()
        end_pass()

    zero.reduce_ready_partitions_and_remove_grads = reduce_in_the_last_pass
    zero.independent_gradient_partition_epilogue = reduce_what_is_left


@dataclass
class Gathering:
    """Weights on their way to all ranks: a parameter's data is what has come, once it has been waited for."""

    work: Any
    weights: list[tuple[Any, Tensor]]

    def wait(self, handle_dependency: bool = True) -> None:
        """Let the current stream wait for the weights, and put them in their parameters' places."""
        del handle_dependency  # of buffers that are copied from; there are none
        if self.weights:
            self.work.wait()
        for parameter, whole in self.weights:
            parameter.data = whole[: parameter.ds_numel].view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
            register_weight(parameter)
        self.weights = []


def gather(parameters: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> Gathering:
    """Begin to gather the weights of partitioned parameters, in the same order on all ranks.

    Each rank holds `ceil(n / world size)` of a parameter's n elements.
    """
    assert not safe_mode, "nothing asks for it"
    assert not quantize, "the trainer never does"
    ordered = sorted(parameters, key=lambda parameter: parameter.ds_id)
    group = ordered[0].ds_process_group
    world_size = distributed.get_world_size(group)
    device = get_accelerator().current_device_name()
    own, weights = list[Tensor](), list[tuple[Any, Tensor]]()
    for parameter in ordered:
        assert parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE, parameter.ds_summary()
        parameter.ds_status = ZeroParamStatus.INFLIGHT
        own.append(parameter.ds_tensor.data.to(device, non_blocking=True))  # from page-locked memory, if it is there
        weights.append((parameter, _space(parameter, own[-1].numel() * world_size, own[-1].dtype, device)))
    with _coalescing_manager(group, async_ops=True) as work:  # which nothing may leave but by its end
        for part, (_, whole) in zip(own, weights, strict=True):
            distributed.all_gather_into_tensor(whole, part, group)
    return Gathering(work, weights)


def _space(parameter: Any, elements: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Memory for a whole parameter: always the same where it stays.

    Else the old would not be free yet where the new is taken, as the host is ahead of the device.
    """
    kept: Tensor | None = getattr(parameter, "spotune_space", None)
    if kept is not None:
        return kept
    space = torch.empty(elements, dtype=dtype, device=device)
    if parameter.ds_persist:
        parameter.spotune_space = space
    return space


def reduce_scatter_mean(gradients: Sequence[Tensor], group: Any) -> list[Tensor]:
    """This rank's part of each gradient's mean over the ranks: the next `ceil(n / world size)` of its n elements.

    Args:
        gradients: of any shapes, equal ones on all ranks; in float16 they are overwritten.
        group: of the ranks.
    """
    world_size, rank = distributed.get_world_size(group), distributed.get_rank(group)
    flat = [gradient.reshape(-1) for gradient in gradients]
    if flat[0].dtype == torch.float16:  # whose sums may be too large
        torch._foreach_div_(flat, world_size)
    padded = [_padded(each, world_size) for each in flat]
    parts = [torch.empty(each.numel() // world_size, dtype=each.dtype, device=each.device) for each in padded]
    with _coalescing_manager(group, async_ops=True) as work:
        for part, whole in zip(parts, padded, strict=True):
            distributed.reduce_scatter_tensor(part, whole, group=group)
    work.wait()
    if flat[0].dtype != torch.float16:
        torch._foreach_div_(parts, world_size)
    return [part[: max(0, each.numel() - rank * part.numel())] for part, each in zip(parts, flat, strict=True)]


def _padded(flat: Tensor, parts: int) -> Tensor:
    missing = math.ceil(flat.numel() / parts) * parts - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat
