"""The fused optimizer step equals DeepSpeed's own at ZeRO stages 1 to 3."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from spotune_trainer.engine import build as engine_build
from spotune_trainer.engine import fused_step, sync_free_step
from spotune_trainer.engine.optimizers import fused_adamw
from tests.trainer.support.groups import run_group
from tests.trainer.support.layouts import FROZEN, Layout, build, release, state_of, train

pytestmark = pytest.mark.slow

LAYOUTS = [Layout(stage, world_size, "bfloat16") for stage in (1, 2, 3) for world_size in (1, 2, 3)]


def trained(layout: Layout, frozen: tuple[str, ...]) -> tuple[dict[str, Tensor], float]:
    """State of an engine after three steps, and the norm of the last gradient."""
    made = build(layout, frozen)
    train(made, 3)
    found, norm = {name: tensor.clone() for name, tensor in state_of(made).items()}, float(made.get_global_grad_norm())
    release(made)
    return found, norm


def largest_difference(_rank: int, world_size: int, stage: int, frozen: tuple[str, ...]) -> tuple[float, float]:
    """Largest relative difference of states and of norms between our step, in chunks of 7 elements, and DeepSpeed's."""
    layout = Layout(stage, world_size, "bfloat16")
    with patch.object(fused_adamw, "STEP_ELEMENTS", 7):
        ours, norm = trained(layout, frozen)
    with patch.object(engine_build, "install_sync_free_step", lambda _engine: None):
        theirs, other = trained(layout, frozen)
    assert ours.keys() == theirs.keys()
    differences = [float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs]
    return max(differences), abs(norm - other) / other


@pytest.mark.parametrize("frozen", [(), FROZEN], ids=["all", "frozen"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_masters_moments_and_norms_equal_those_of_deepspeeds_step(layout: Layout, frozen: tuple[str, ...]) -> None:
    for held, norms in run_group(layout.world_size, largest_difference, layout.stage, frozen):
        assert held < 1e-5
        assert norms < 1e-6


def after_a_step(_rank: int, world_size: int, stage: int) -> tuple[int, bool]:
    """Number of fused steps that an engine takes in one step, and whether its gradients are freed."""
    name = "fused_step_at_stage_3" if stage == 3 else "fused_step_at_stage_1_or_2"
    with patch.object(sync_free_step, name, wraps=getattr(fused_step, name)) as steps:
        made: Any = build(Layout(stage, world_size, "bfloat16"))
        train(made, 1)
    kept = [parameter.grad for parameter in made.module.parameters()] + list(made.optimizer.averaged_gradients.values())
    return steps.call_count, all(each is None for each in kept)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_freed_by_the_step(stage: int) -> None:
    assert run_group(2, after_a_step, stage) == [(1, True)] * 2


def buckets(_rank: int, world_size: int, stage: int) -> int:
    """Elements of the buckets that gradients were copied into."""
    made: Any = build(Layout(stage, world_size, "bfloat16"))
    seen: list[int] = []
    reduce = made.optimizer.average_tensor

    def counted(tensor: Tensor, dtype: torch.dtype) -> None:
        seen.append(tensor.numel())
        reduce(tensor, dtype)

    made.optimizer.average_tensor = counted
    train(made, 1)
    return sum(seen)


@pytest.mark.parametrize(("stage", "world_size", "copied"), [(1, 1, False), (1, 2, True), (2, 1, True)])
def test_a_single_rank_copies_no_gradients_to_buckets(stage: int, world_size: int, copied: bool) -> None:
    assert all((found > 0) is copied for found in run_group(world_size, buckets, stage))
