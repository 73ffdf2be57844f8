"""Gradient sums with the same bits at any world size, for `execution.reproducible: worldSize`.

The gradient of a step is the sum over its micro-batches. In floating point it depends on the order, so on which rank
has which micro-batches. Here each gradient is rounded to a multiple of 2^-48 and added up in 64-bit integers, whose sum
does not depend on the order. The norm is a sum of integers as well. AdamW then updates each element by correctly
rounded operations (`elementwise_adamw.py`), because the fused kernel rounds differently at the end of a vector, and
where a rank's vectors end depends on the world size.

Range and resolution. The sum of a step is less than 2^14; a larger gradient counts as not finite, and the step is
skipped. Rounding moves a gradient by at most 2^-49 = 1.8e-15. AdamW divides by sqrt(v) + epsilon, so for each
micro-batch this moves a weight by at most about 1.8e-7 of the learning rate at epsilon = 1e-8: the rounding of fp32.

`install_fixed_point_gradients` patches the objects of one engine (DeepSpeed 0.19, deepspeed/runtime/):

    what DeepSpeed calls           stage  replaced by
    -----------------------------  -----  ------------------------------------------------------------------------
    engine.allreduce_gradients     0 to 2 adds the gradients of a backward pass to the sums, and frees them
    engine.optimizer.step          0 to 2 sums over the ranks, norm, clipping, AdamW, and gathering of the weights
    engine.clip_fp32_gradients     0      nothing: the step clips
    zero.process_gradients         1, 2   nothing: gradients stay where the backward pass has put them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from spotune.errors import JobError
from spotune_trainer.engine.fused_step import fused_step_at_stage_1_or_2
from spotune_trainer.engine.optimizers.elementwise_adamw import CHUNK_ELEMENTS, elementwise_adamw_step
from spotune_trainer.engine.sync_free_step import clip_coefficient, skip_step_unless_finite

_FRACTION_BITS = 48
_UNIT = 2.0**-_FRACTION_BITS
_LARGEST_SUM = 2.0**14
_LIMB_BITS = 28
"""Bits of each of the two integers that a square is cut into; 2^34 of them add up without overflow."""
_GRADIENTS = "fixed_point_gradients"
"""Attribute of an engine that sums gradients in fixed point: its `FixedPointGradients`."""


@dataclass(frozen=True)
class SummedGroup:
    """The sums of some parameters.

    Attributes:
        sums: of this rank's micro-batches, int64, in units of 2^-48, ``[elements]``.
        parameters: each with its first element in `sums`.
        partition: the elements that this rank updates.
    """

    sums: Tensor
    parameters: Sequence[tuple[Any, int]]
    partition: slice


class FixedPointGradients:
    """The gradients of a step, summed over micro-batches and ranks in fixed point.

    Args:
        groups: the sums; all zero.
        terms: number of micro-batches of a step over all ranks.
        process_group: of all ranks.
        is_partitioned: whether each rank updates its own partition only.
    """

    def __init__(self, groups: Sequence[SummedGroup], terms: int, process_group: Any, *, is_partitioned: bool) -> None:
        self._groups = groups
        self._limit = _LARGEST_SUM / terms
        self._process_group = process_group
        self._is_partitioned = is_partitioned
        self._largest = torch.zeros((), device=groups[0].sums.device)
        self._is_alone = distributed.get_world_size(process_group) == 1

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of one backward pass, and free them."""
        largest = [self._largest]
        for group in self._groups:
            for parameter, start in group.parameters:
                if parameter.grad is not None:
                    gradient, parameter.grad = parameter.grad.reshape(-1), None
                    largest += [bound.abs().float() for bound in torch.aminmax(gradient)]
                    sums = group.sums[start : start + gradient.numel()]
                    for total, chunk in zip(_chunks(sums), _chunks(gradient), strict=True):
                        # Multiplication by a power of two is exact in any floating-point format.
                        total.add_(chunk.mul(1 / _UNIT).round_().to(torch.int64))
        self._largest = torch.stack(largest).amax()  # NaN if one of them is

    def reduce(self) -> list[Tensor]:
        """Sum over the ranks. Returns each group's sums of this rank's partition, int64. Collective."""
        for group in self._groups:
            partition = group.sums[group.partition]
            if self._is_alone:
                continue
            if self._is_partitioned and group.sums.is_cuda:
                distributed.reduce_scatter_tensor(partition, group.sums, group=self._process_group)
            else:  # gloo's reduce-scatter takes four times as long as its all-reduce
                distributed.all_reduce(group.sums, group=self._process_group)
        return [group.sums[group.partition] for group in self._groups]

    def norm(self, partitions: Sequence[Tensor]) -> Tensor:
        """L2 norm of the gradient of all partitions, a scalar, fp32. Collective.

        It is NaN if a gradient was not finite, or so large that the sums may have overflowed.
        """
        bounds = [bound for partition in partitions if partition.numel() for bound in torch.aminmax(partition)]
        peak = torch.stack([partitions[0].new_zeros(()), *(bound.abs() for bound in bounds)]).amax()
        is_invalid = ~(self._largest <= self._limit)
        maxima = torch.stack([peak, is_invalid.to(torch.int64)])
        if not self._is_alone:
            distributed.all_reduce(maxima, distributed.ReduceOp.MAX, group=self._process_group)
        _, exponent = torch.frexp(maxima[0].double())
        limbs = torch.stack([_sum_of_squares(chunk, exponent) for each in partitions for chunk in _chunks(each)]).sum(0)
        if self._is_partitioned and not self._is_alone:
            distributed.all_reduce(limbs, group=self._process_group)
        high, low = limbs.double()
        squares = torch.ldexp(high, _int(-_LIMB_BITS, high)) + torch.ldexp(low, _int(-2 * _LIMB_BITS, low))
        norm = torch.ldexp(squares.sqrt(), exponent - _FRACTION_BITS).float()
        return torch.where(maxima[1] > 0, torch.full_like(norm, float("nan")), norm)

    def clear(self) -> None:
        """Begin the next step."""
        self._largest.zero_()
        for group in self._groups:
            group.sums.zero_()


def _sum_of_squares(numbers: Tensor, exponent: Tensor) -> Tensor:
    """Sum of (number / 2^exponent)^2 as two integers, ``[2]``, in units of 2^-28 and 2^-56.

    Args:
        numbers: int64, at most 2^exponent in magnitude, up to 2^24 of them.
        exponent: a scalar.
    """
    scaled = numbers.double() * torch.ldexp(torch.ones((), dtype=torch.float64, device=numbers.device), -exponent)
    squares = scaled.square_().mul_(2.0**_LIMB_BITS)
    high = squares.floor()
    low = squares.sub_(high).mul_(2.0**_LIMB_BITS).floor_()
    return torch.stack([high.sum(), low.sum()]).to(torch.int64)  # sums of integers below 2^53 are exact


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor, CHUNK_ELEMENTS[tensor.device.type])


def _int(value: int, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device=like.device)


def install_fixed_point_gradients(engine: Any, terms: int) -> None:
    """Make an engine sum gradients in fixed point; see above.

    The losses of all ranks must be weighted so that a step's gradient is their sum, not their mean over the ranks.

    Args:
        engine: with AdamW, without offload, in float32 or bfloat16.
        terms: number of micro-batches of a step over all ranks.

    Raises:
        JobError: the engine runs ZeRO stage 3.
    """
    stage = engine.zero_optimization_stage()
    if stage == 3:
        raise JobError("execution.reproducible: worldSize does not support ZeRO stage 3: set execution.zeroStage to 2")
    groups = list(_flat_groups(engine.optimizer) if stage else _whole_parameters(engine.basic_optimizer))
    gradients = FixedPointGradients(groups, terms, engine.data_parallel_group, is_partitioned=stage > 0)
    setattr(engine, _GRADIENTS, gradients)
    engine.allreduce_gradients = lambda *_, **__: gradients.accumulate()
    if stage:
        engine.optimizer.process_gradients = lambda *_: None
        engine.optimizer.overflow = False
    else:
        engine.clip_fp32_gradients = lambda: None
    update = _update_at_stage_1_or_2 if stage else _update_at_stage_0
    engine.optimizer.step = _step(engine, gradients, update)


def has_fixed_point_gradients(engine: Any) -> bool:
    """Whether an engine sums gradients in fixed point."""
    return hasattr(engine, _GRADIENTS)


def _step(
    engine: Any, gradients: FixedPointGradients, update: Callable[[Any, Sequence[Tensor], Tensor], None]
) -> Callable[..., None]:
    def step(closure: Any = None) -> None:
        partitions = gradients.reduce()
        norm = gradients.norm(partitions)
        skip_step_unless_finite(engine.basic_optimizer, norm)
        update(engine, partitions, clip_coefficient(norm, engine.gradient_clipping()) * _UNIT)
        engine.optimizer._global_grad_norm = norm
        gradients.clear()

    return step


def _update_at_stage_0(engine: Any, partitions: Sequence[Tensor], factor: Tensor) -> None:
    optimizer = engine.basic_optimizer
    for group, sums in zip(optimizer.param_groups, partitions, strict=True):
        start = 0
        for master in group["params"]:
            gradient = [(0, sums[start : start + master.numel()])]
            elementwise_adamw_step(group, optimizer.state[master], master, gradient, factor, optimizer.found_inf)
            start += master.numel()


def _update_at_stage_1_or_2(engine: Any, partitions: Sequence[Tensor], factor: Tensor) -> None:
    zero = engine.optimizer
    for index, sums in enumerate(partitions):
        zero.averaged_gradients[index] = [sums]
    fused_step_at_stage_1_or_2(zero, engine.basic_optimizer, factor, elementwise_adamw_step)


def _whole_parameters(optimizer: torch.optim.Optimizer) -> Iterator[SummedGroup]:
    """Stage 0: every rank updates all parameters."""
    for group in optimizer.param_groups:
        parameters, elements = [], 0
        for parameter in group["params"]:
            parameters.append((parameter, elements))
            elements += parameter.numel()
        sums = torch.zeros(elements, dtype=torch.int64, device=parameters[0][0].device)
        yield SummedGroup(sums, parameters, slice(0, elements))


def _flat_groups(zero: Any) -> Iterator[SummedGroup]:
    """Stages 1 and 2: the sums of a group have the layout of its flat weights, which DeepSpeed cuts into partitions."""
    for index, flat in enumerate(zero.bit16_groups_flat):
        partition = zero.parallel_partitioned_bit16_groups[index][
            distributed.get_rank(zero.real_dp_process_group[index])
        ]
        start = partition.storage_offset() - flat.storage_offset()
        parameters = [(each, each.storage_offset() - flat.storage_offset()) for each in zero.bit16_groups[index]]
        sums = torch.zeros(flat.numel(), dtype=torch.int64, device=flat.device)
        yield SummedGroup(sums, parameters, slice(start, start + partition.numel()))
