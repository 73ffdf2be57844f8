"""Gradients in fixed point: sums and norms that depend neither on the order nor on the partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from spotune_trainer.engine.build import EngineConfig, build_engine
from spotune_trainer.engine.fixed_point_gradients import FixedPointGradients, SummedGroup
from tests.trainer.support.groups import GroupFailedError, run_group
from tests.trainer.support.layouts import FROZEN, build_model
from tests.trainer.support.tiny import make_job

pytestmark = pytest.mark.slow

ELEMENTS = 1001
TERMS = 6
UNIT = 2.0**-48


def micro_batch_gradients() -> Tensor:
    """Gradients of each micro-batch over twenty orders of magnitude, ``[TERMS, ELEMENTS]``."""
    random = torch.Generator().manual_seed(3)
    magnitudes = 10.0 ** torch.linspace(-18, 2, ELEMENTS)
    return torch.randn(TERMS, ELEMENTS, generator=random) * magnitudes


def make(partition: slice = slice(0, ELEMENTS), *, is_partitioned: bool = False) -> tuple[Any, FixedPointGradients]:
    """A parameter, and the sums of its gradients."""
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
    group = SummedGroup(torch.zeros(ELEMENTS, dtype=torch.int64), [(parameter, 0)], partition)
    world = distributed.group.WORLD
    return parameter, FixedPointGradients([group], TERMS, world, is_partitioned=is_partitioned)


def sums_in_order(_rank: int, _world_size: int, order: Sequence[int]) -> tuple[list[int], list[float], float]:
    """Sums of all gradients in an order: in fixed point, in fp32, and the norm of the first."""
    parameter, sums = make()
    gradients = micro_batch_gradients()
    usual = torch.zeros(ELEMENTS)
    for index in order:
        parameter.grad = gradients[index].clone()
        sums.accumulate()
        assert parameter.grad is None
        usual += gradients[index]
    [found] = sums.reduce()
    return found.tolist(), usual.tolist(), float(sums.norm([found]))


def test_sums_do_not_depend_on_the_order_of_micro_batches() -> None:
    [(first, usual, norm)] = run_group(1, sums_in_order, [0, 1, 2, 3, 4, 5])
    [(second, other, same)] = run_group(1, sums_in_order, [4, 2, 5, 0, 3, 1])
    assert (first, norm) == (second, same)
    assert usual != other, "control: sums in floating point do"


def test_a_sum_is_at_most_half_a_unit_per_micro_batch_off_and_its_norm_is_right() -> None:
    [(found, _, norm)] = run_group(1, sums_in_order, range(TERMS))
    exact = micro_batch_gradients().double().sum(0)
    assert float((torch.tensor(found).double() * UNIT - exact).abs().max()) <= TERMS * UNIT / 2
    assert norm == pytest.approx(float(exact.norm()), rel=1e-7)


def sums_over_ranks(rank: int, world_size: int, is_partitioned: bool) -> tuple[int, list[int], float]:
    """First element of this rank's partition, the partition of the sums over all ranks, and the norm of all."""
    share = -(-ELEMENTS // world_size)
    partition = slice(rank * share, min((rank + 1) * share, ELEMENTS)) if is_partitioned else slice(0, ELEMENTS)
    parameter, sums = make(partition, is_partitioned=is_partitioned)
    for index, gradient in enumerate(micro_batch_gradients()):
        if index % world_size == rank:
            parameter.grad = gradient.clone()
            sums.accumulate()
    [found] = sums.reduce()
    return partition.start, found.tolist(), float(sums.norm([found]))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_sums_and_norm_over_ranks_are_those_of_one(world_size: int, is_partitioned: bool) -> None:
    [(expected, _, norm)] = run_group(1, sums_in_order, range(TERMS))
    for start, found, of_all in run_group(world_size, sums_over_ranks, is_partitioned):
        assert found == expected[start : start + len(found)]
        assert of_all == norm


def norm_with(rank: int, _world_size: int, value: float) -> float:
    """The norm if one element of a gradient of rank 1 has a value; then that of a step without it."""
    parameter, sums = make()
    parameter.grad = torch.ones(ELEMENTS)
    if rank == 1:
        parameter.grad[7] = value
    sums.accumulate()
    norm = float(sums.norm(sums.reduce()))
    sums.clear()
    parameter.grad = torch.ones(ELEMENTS)
    sums.accumulate()
    assert float(sums.norm(sums.reduce())) == pytest.approx(2 * ELEMENTS**0.5)
    return norm


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 2.0**14])
def test_norm_is_nan_on_all_ranks_if_the_gradient_of_one_is_out_of_range(value: float) -> None:
    assert all(norm != norm for norm in run_group(2, norm_with, value))  # NaN


def test_largest_gradients_are_summed() -> None:
    largest = 2.0**14 / TERMS
    assert run_group(2, norm_with, largest) == [pytest.approx(largest, rel=1e-3)] * 2


def build_at_stage_3(_rank: int, _world_size: int) -> None:
    """Build an engine that cannot sum in fixed point."""
    config = EngineConfig(3, 1, 1, torch.float32, False, fixed_point_terms=TERMS)
    build_engine(build_model(torch.float32, FROZEN), make_job("/model").spec.training, config)


def test_stage_3_is_refused_also_if_an_older_plan_has_chosen_it() -> None:
    with pytest.raises(GroupFailedError, match=r"execution\.reproducible: .* set execution\.zeroStage to 2"):
        run_group(1, build_at_stage_3)
