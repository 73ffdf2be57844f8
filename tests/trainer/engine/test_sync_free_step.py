"""Steps do not wait for the device; the host's run-ahead at ZeRO stage 3 is limited; layers are gathered at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import z3_leaf_module

from spotune.plan.memory import LIVE_PARAMETERS
from spotune_trainer.engine.compile.layers import repeated_layers
from spotune_trainer.engine.sync_free_step import limit_run_ahead
from tests.trainer.support.groups import run_group
from tests.trainer.support.layouts import FROZEN, Layout, build, train_in_passes


@dataclass
class Device:
    """A fake CUDA stream that records for which events the host waits."""

    modules: int = 0
    waited_for: list[int] = field(default_factory=list)

    def record_event(self) -> Any:
        number = self.modules
        self.modules += 1
        return SimpleNamespace(synchronize=lambda: self.waited_for.append(number))


def module(number: int, parameters: int) -> Any:
    made: Any = torch.nn.Linear(1, 1, bias=False)
    made.ds_id, made.ds_external_parameters = number, dict
    made.weight.ds_numel, made.weight.ds_persist = parameters, False
    return made


@pytest.mark.parametrize(
    ("parameters", "ahead"),
    [(LIVE_PARAMETERS // 8, 4), (LIVE_PARAMETERS // 2, 1), (2 * LIVE_PARAMETERS, 1)],
)
def test_the_host_runs_ahead_by_a_limited_number_of_parameters(
    parameters: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, fetched = Device(), list[tuple[int, bool]]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device)
    coordinator: Any = SimpleNamespace(fetch_sub_module=lambda m, forward: fetched.append((m.ds_id, forward)))
    limit_run_ahead(coordinator)
    modules = [module(number, parameters) for number in range(6)]
    for step, each in enumerate(modules):
        coordinator.fetch_sub_module(each, forward=True)
        assert device.waited_for == list(range(step + 1 - ahead))
    coordinator.fetch_sub_module(modules[0], forward=False)
    assert fetched == [*((number, True) for number in range(6)), (0, False)]


@pytest.mark.parametrize(("is_layer", "waited_for"), [(True, [0, 1]), (False, [])])
def test_layers_that_stay_gathered_count_because_of_their_gradients(
    is_layer: bool, waited_for: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device)
    coordinator: Any = SimpleNamespace(fetch_sub_module=lambda m, forward: None)
    limit_run_ahead(coordinator)
    for number in range(3):
        each = module(number, LIVE_PARAMETERS)
        each.weight.ds_persist, each._z3_leaf = True, is_layer
        coordinator.fetch_sub_module(each, forward=True)
    assert device.waited_for == waited_for


def whole_layers(_rank: int, _world_size: int, frozen: tuple[str, ...]) -> list[bool]:
    engine = build(Layout(3, 1, "bfloat16"), frozen)
    return [z3_leaf_module(layer) for layer in repeated_layers(engine.module)]


@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "whole"), [((), True), (FROZEN, False)])
def test_a_layer_is_gathered_at_once_unless_weights_are_frozen(frozen: tuple[str, ...], whole: bool) -> None:
    assert run_group(1, whole_layers, frozen) == [[whole]]


def waits_for_device(_rank: int, world_size: int, stage: int) -> int:
    """How often DeepSpeed waits until the device has computed everything, in four steps of two micro-batches."""
    engine, accelerator, waits = build(Layout(stage, world_size, "bfloat16")), get_accelerator(), list[None]()
    accelerator.synchronize = lambda *_: waits.append(None)
    train_in_passes(engine, steps=4, passes=2)
    return len(waits)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 1), (2, 2), (3, 1)])
def test_no_step_waits_for_the_device(stage: int, ranks: int) -> None:
    assert run_group(ranks, waits_for_device, stage) == [0] * ranks
