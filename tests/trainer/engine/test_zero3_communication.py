"""ZeRO stage 3 collectives without copies give what DeepSpeed and a single rank compute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, distributed

from spotune_trainer.engine import zero3_communication
from spotune_trainer.engine.build import EngineConfig, build_engine, set_learning_rate
from spotune_trainer.engine.compile.gradient_accumulation_fusion import fuse_gradient_accumulation
from spotune_trainer.engine.compile.layers import repeated_layers
from spotune_trainer.engine.zero3_communication import all_gather_parameters, reduce_scatter_mean
from tests.trainer.support.groups import run_group
from tests.trainer.support.layouts import (
    FROZEN,
    VOCABULARY,
    Layout,
    build,
    build_model,
    dividing_everything,
    state_of,
    train,
    train_in_passes,
)
from tests.trainer.support.tiny import make_job

pytestmark = pytest.mark.slow

SHAPES = ((7,), (2, 4), (3, 3), (1,))
WORLD_SIZES = (1, 2, 3)


def gradients(rank: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=random).to(dtype) for shape in SHAPES]


def own_parts(rank: int, _world_size: int, dtype: torch.dtype) -> list[list[float]]:
    return [part.tolist() for part in reduce_scatter_mean(gradients(rank, dtype), distributed.group.WORLD)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_scatter_mean_gives_each_rank_its_partition_of_the_mean(world_size: int, dtype: torch.dtype) -> None:
    parts = run_group(world_size, own_parts, dtype)
    for index in range(len(SHAPES)):
        each = [gradients(rank, dtype)[index].float() for rank in range(world_size)]
        mean = torch.stack(each).mean(0).flatten()
        lengths = [len(parts[rank][index]) for rank in range(world_size)]
        chunk = math.ceil(mean.numel() / world_size)
        assert lengths == [max(0, min(chunk, mean.numel() - rank * chunk)) for rank in range(world_size)]
        joined = torch.tensor([value for rank in range(world_size) for value in parts[rank][index]])
        torch.testing.assert_close(joined, mean, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def gathered(_rank: int, world_size: int) -> list[bool]:
    """For each parameter, whether our all-gather gives the same as DeepSpeed's."""
    engine = build(Layout(3, world_size, "float32"))
    parameters = [each for each in engine.module.parameters() if each.ds_tensor is not None]
    for parameter in parameters:
        parameter.partition()  # small ones stay with everybody
    parameters[0].all_gather_coalesced(parameters).wait()
    ours = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.partition()
        parameter.all_gather()
    return [torch.equal(mine, parameter) for mine, parameter in zip(ours, parameters, strict=True)]


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_gathered_weights_equal_those_that_deepspeed_gathers(world_size: int) -> None:
    for each in run_group(world_size, gathered):
        assert each
        assert all(each)


def calls(_rank: int, world_size: int) -> tuple[int, int]:
    """Number of calls of our all-gather and reduce-scatter in one step."""
    with (
        patch.object(
            zero3_communication, "all_gather_parameters", wraps=zero3_communication.all_gather_parameters
        ) as gathers,
        patch.object(
            zero3_communication, "reduce_scatter_mean", wraps=zero3_communication.reduce_scatter_mean
        ) as reductions,
    ):
        train(build(Layout(3, world_size, "float32")), 1)
    return gathers.call_count, reductions.call_count


@pytest.mark.parametrize(("world_size", "is_ours"), [(1, False), (2, True)])
def test_an_engine_uses_our_collectives_unless_it_has_one_rank(world_size: int, is_ours: bool) -> None:
    for gathers, reductions in run_group(world_size, calls):
        assert (gathers > 0) is is_ours
        assert (reductions > 0) is is_ours


def in_passes(_rank: int, _world_size: int, whole_gradients: bool) -> tuple[dict[str, list[float]], int, int]:
    """State after two steps of three micro-batches, gradient elements held between these, and number of reductions."""
    config = EngineConfig(3, 1, 3, torch.float32, gradient_checkpointing=False, whole_gradients=whole_gradients)
    model = build_model(torch.float32, ())
    if whole_gradients:  # as compiled layers do
        fuse_gradient_accumulation(repeated_layers(model))
    with (
        patch.object(
            zero3_communication, "reduce_scatter_mean", wraps=zero3_communication.reduce_scatter_mean
        ) as reductions,
        dividing_everything(),
    ):
        made = build_engine(model, make_job("/model").spec.training, config)
        held = train_in_passes(made, steps=2, passes=3)
    return {name: tensor.flatten().tolist() for name, tensor in state_of(made).items()}, held, reductions.call_count


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_whole_gradients_are_reduced_once_a_step_with_equal_results(world_size: int) -> None:
    each_pass, once = (run_group(world_size, in_passes, whole) for whole in (False, True))
    for (expected, nothing, often), (found, gradients_held, seldom) in zip(each_pass, once, strict=True):
        assert (nothing, gradients_held) == (0, sum(p.numel() for p in build_model(torch.float32, ()).parameters()))
        assert often == 3 * seldom
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-6)


def without_a_layer(_rank: int, _world_size: int, whole_gradients: bool) -> dict[str, list[float]]:
    """State after two steps of two micro-batches. The second micro-batch skips a layer."""
    config = EngineConfig(3, 1, 2, torch.float32, gradient_checkpointing=False, whole_gradients=whole_gradients)
    with dividing_everything():
        model = build_model(torch.float32, (), layers=2)
        made = build_engine(model, make_job("/model").spec.training, config)
    left_out = made.module.model.layers.pop(1)
    whole, shortened = [*made.module.model.layers, left_out], [*made.module.model.layers]
    random = torch.Generator().manual_seed(0)
    set_learning_rate(made, 0.01)
    for number, layers in enumerate([whole, shortened] * 2):
        made.module.model.layers = torch.nn.ModuleList(layers)
        made.module.config.num_hidden_layers = len(layers)
        tokens = torch.randint(1, VOCABULARY, (2, 6), generator=random)
        made.set_gradient_accumulation_boundary(number % 2 == 1)
        made.backward(made(input_ids=tokens, labels=tokens).loss / 2)
        made.step()
    made.module.model.layers = torch.nn.ModuleList(whole)
    return {name: tensor.flatten().tolist() for name, tensor in state_of(made).items()}


@pytest.mark.long
def test_parameters_unused_in_the_last_micro_batch_are_reduced_as_well() -> None:
    each_pass, once = (run_group(2, without_a_layer, whole) for whole in (False, True))
    for expected, found in zip(each_pass, once, strict=True):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-6)


def gathered_between_passes(
    _rank: int, _world_size: int, frozen: tuple[str, ...], layers: int
) -> tuple[set[str], Any, int]:
    """Parameters that are whole between two micro-batches, and all-gathers of each in three micro-batches.

    The third value is DeepSpeed's count of parameters gathered ahead.
    """
    config = EngineConfig(3, 1, 3, torch.float32, gradient_checkpointing=False, gathered_layers=layers)
    with dividing_everything():
        model = build_model(torch.float32, frozen, layers=3)
        made = build_engine(model, make_job("/model").spec.training, config)
    names = {parameter: name for name, parameter in made.module.named_parameters()}
    coordinator = made.optimizer.parameter_offload.get_param_coordinator()
    gathers = Counter[str]()

    def counted(parameters: Iterable[Any], **options: Any) -> Any:
        gathers.update(names[each] for each in parameters)
        return all_gather_parameters(parameters, **options)

    train_in_passes(made, steps=2, passes=3)
    with patch.object(zero3_communication, "all_gather_parameters", counted):
        train_in_passes(made, steps=1, passes=3)
    train_in_passes(made, steps=1, passes=1, boundary=False)
    whole = {name for each, name in names.items() if each.ds_status == ZeroParamStatus.AVAILABLE}
    return whole, gathers, coordinator._PartitionedParameterCoordinator__n_available_params


OUTSIDE = {"model.embed_tokens.weight", "model.norm.weight"}


@pytest.mark.parametrize(
    ("frozen", "layers", "kept"),
    [
        ((), 0, set()),
        pytest.param((), 1, {2}, marks=pytest.mark.long),
        ((), 2, {1, 2}),
        ((), 3, {0, 1, 2}),
        (FROZEN, 2, None),
    ],
    ids=["none", "one", "two", "all", "beside an adapter"],
)
def test_parameters_that_stay_gathered_are_gathered_once_a_step(
    frozen: tuple[str, ...], layers: int, kept: set[int] | None
) -> None:
    names = {name for name, _ in build_model(torch.float32, layers=3).named_parameters()}
    expected = set() if kept is None else OUTSIDE | {name for name in names if layer_of(name) in kept}
    for whole, gathers, ahead in run_group(2, gathered_between_passes, frozen, layers):
        assert (whole, ahead) == (expected, 0)
        assert all(gathers[name] == 1 for name in expected)
        assert all(gathers[name] >= 3 for name in names - expected)


def layer_of(name: str) -> int | None:
    return int(name.split(".")[2]) if ".layers." in name else None


def on_every_rank(_rank: int, _world_size: int) -> set[str]:
    """Names of the parameters that are not partitioned."""
    made = build(Layout(3, 2, "float32"), ())
    small = {each.ds_id for each in made.optimizer.persistent_parameters}
    return {name for name, each in made.module.named_parameters() if each.ds_id in small}


def test_only_norms_stay_whole_even_in_a_small_model() -> None:
    norms = {name for name, each in build_model(torch.float32).named_parameters() if each.dim() == 1}
    assert run_group(2, on_every_rank) == [norms, norms]


def held_after_steps(_rank: int, _world_size: int, dtype: torch.dtype, layers: int) -> tuple[Any, list[int]]:
    """State after steps of two micro-batches, and the address of the first layer's weights after each step."""
    config = EngineConfig(3, 1, 2, dtype, gradient_checkpointing=False, gathered_layers=layers)
    with dividing_everything():
        made = build_engine(build_model(dtype, (), layers=2), make_job("/model").spec.training, config)
    weight, places = made.module.model.layers[0].mlp.up_proj.weight, []
    for _ in range(4):
        train_in_passes(made, steps=1, passes=2)
        places.append(weight.spotune_whole_buffer.data_ptr() if layers else 0)
    return {name: tensor.flatten().tolist() for name, tensor in state_of(made).items()}, places


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeping_layers_gathered_does_not_change_the_results(dtype: torch.dtype) -> None:
    again, once = (run_group(2, held_after_steps, dtype, layers) for layers in (0, 2))
    for (expected, _), (found, places) in zip(again, once, strict=True):
        assert found == expected
        assert len(set(places)) == 1
