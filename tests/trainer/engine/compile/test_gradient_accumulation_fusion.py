"""Fused gradient accumulation gives the sums that autograd computes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spotune_trainer.engine.build import EngineConfig, build_engine
from spotune_trainer.engine.compile import gradient_accumulation_fusion as weight_gradients
from spotune_trainer.engine.compile.gradient_accumulation_fusion import fuse_gradient_accumulation, register_weight
from spotune_trainer.engine.compile.layers import repeated_layers
from tests.trainer.support.groups import run_group
from tests.trainer.support.layouts import build_model, dividing_everything, train_in_passes
from tests.trainer.support.tiny import make_job

pytestmark = pytest.mark.slow

PASSES = 3


class Block(nn.Module):
    """A layer with a bias, and with a linear module that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        once: Tensor = self.down(self.up(rows).relu())
        twice: Tensor = self.down(self.up(once).tanh())
        return twice


@pytest.fixture
def blocks() -> tuple[Any, Any]:
    """A plain layer, and a copy with gradient accumulation fusion."""
    torch.manual_seed(0)
    plain = Block()
    adding = copy.deepcopy(plain)
    fuse_gradient_accumulation([adding])
    return plain, adding


def eager(block: nn.Module) -> Callable[[Tensor], Tensor]:
    return block.forward


def compiled(block: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(block.forward, dynamic=False)


def checkpointed(block: nn.Module) -> Callable[[Tensor], Tensor]:
    layer = compiled(block)
    return lambda rows: checkpoint(layer, rows, use_reentrant=False)


def batches() -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(1)
    return (torch.randn(2, 5, 8, generator=random) for _ in range(PASSES))


@pytest.mark.parametrize("form", [eager, compiled, checkpointed])
def test_gradients_accumulate_over_all_micro_batches(form: Any, blocks: tuple[Any, Any]) -> None:
    plain, adding = blocks
    for parameter in adding.parameters():
        register_weight(parameter)
    layer, places = form(adding), list[int]()
    for rows in batches():
        plain(rows).square().sum().backward()
        layer(rows.clone().requires_grad_()).square().sum().backward()
        places.append(adding.up.weight.grad.data_ptr())
    for (name, expected), found in zip(plain.named_parameters(), adding.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name)
    assert len(set(places)) == 1, "each sum is where the one before was"


def test_input_gradients_equal_those_of_plain_linear_modules(blocks: tuple[Any, Any]) -> None:
    found = []
    for block in blocks:
        rows = next(batches()).requires_grad_()
        block(rows).square().sum().backward()
        found.append(rows.grad)
    torch.testing.assert_close(found[1], found[0])


def additions(block: Any) -> int:
    """Number of calls of addmm over all micro-batches."""
    with patch.object(torch, "addmm", wraps=torch.addmm) as calls:
        for rows in batches():
            block(rows).square().sum().backward()
    return calls.call_count


def test_only_registered_weights_are_fused(blocks: tuple[Any, Any]) -> None:
    """If a weight is used twice in a micro-batch, one use is fused and autograd adds the other."""
    plain, adding = blocks
    assert additions(plain) == additions(adding) == 0
    register_weight(adding.up.weight)
    adding.zero_grad()
    assert additions(adding) == PASSES - 1


def test_weights_that_have_moved_or_been_freed_are_not_fused(blocks: tuple[Any, Any]) -> None:
    _, adding = blocks
    register_weight(adding.up.weight)
    register_weight(adding.down.weight)
    at = adding.up.weight.data_ptr()
    adding.up.weight.data = adding.up.weight.data.clone()  # as where weights are partitioned and gathered again
    assert additions(adding) == PASSES - 1
    assert at in weight_gradients._parameters
    adding.up = None
    gc.collect()
    assert at not in weight_gradients._parameters


def test_frozen_linear_modules_and_other_modules_are_not_replaced() -> None:
    class Other(nn.Linear):
        pass

    frozen, other = nn.Linear(2, 2).requires_grad_(False), Other(2, 2)
    fuse_gradient_accumulation([nn.Sequential(frozen, other)])
    assert [type(frozen), type(other)] == [nn.Linear, Other]


def test_evaluation_uses_the_plain_linear_operation(blocks: tuple[Any, Any]) -> None:
    plain, adding = blocks
    rows = next(batches())
    with patch.object(weight_gradients, "linear", side_effect=AssertionError("not in an evaluation")):
        assert torch.equal(adding.eval()(rows), plain(rows))


def engine_additions(_rank: int, _world_size: int, stage: int, whole_gradients: bool, divided: bool) -> list[int]:
    """Sums that an engine's layers begin with, in each of three steps of three passes.

    In its first passes stage 3 gathers otherwise than later.
    """
    model = build_model(torch.float32, ())
    fuse_gradient_accumulation(repeated_layers(model))
    config = EngineConfig(stage, 1, 3, torch.float32, gradient_checkpointing=False, whole_gradients=whole_gradients)
    with dividing_everything() if divided else nullcontext():
        engine = build_engine(model, make_job("/model").spec.training, config)
    counts = []
    for _ in range(3):
        with patch.object(torch, "addmm", wraps=torch.addmm) as calls:
            train_in_passes(engine, steps=1, passes=3)
        counts.append(calls.call_count)
    return counts


@pytest.mark.parametrize("divided", [pytest.param(True, marks=pytest.mark.long), False], ids=["divided", "small"])
@pytest.mark.parametrize(
    ("world_size", "stage", "whole_gradients", "passes"),
    [(2, 0, False, 2), (1, 1, False, 2), (2, 1, False, 2), (2, 2, False, 0), (2, 3, False, 0), (2, 3, True, 2)],
)
def test_all_micro_batches_but_the_first_add_to_whole_gradients(
    world_size: int, stage: int, whole_gradients: bool, passes: int, divided: bool
) -> None:
    """All steps must be alike, or a resumed run would differ."""
    matrices = sum(type(module) is nn.Linear for module in repeated_layers(build_model(torch.float32))[0].modules())
    found = run_group(world_size, engine_additions, stage, whole_gradients, divided)
    assert found == world_size * [3 * [passes * matrices]]
