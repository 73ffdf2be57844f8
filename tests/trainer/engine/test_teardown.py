"""A process that leaves a process group takes part in another one, unless something of the last one is left."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from spotune.retry import FailureCause
from spotune_trainer.engine.teardown import ProcessBaseline, abort_process_groups
from spotune_trainer.training.failures import classify
from tests.trainer.support.groups import run_group
from tests.trainer.support.layouts import BACKENDS, Layout, build, build_model, state_of, train

pytestmark = pytest.mark.slow

GENERATIONS = 3
LOST = 1
"""The rank that leaves each generation first."""


class LostError(Exception):
    """What the lost rank raises."""


def lose(*_: object) -> None:
    raise LostError


def train_until_a_rank_is_lost(rank: int, layout: Layout, store: Path) -> dict[str, list[float]]:
    """One generation; returns the engine's state before a rank was lost in the middle of a forward pass."""
    distributed.init_process_group(BACKENDS, init_method=f"file://{store}", rank=rank, world_size=layout.world_size)
    engine = build(layout)
    train(engine, steps=2)
    state = {name: tensor.flatten().tolist() for name, tensor in state_of(engine).items()}
    if rank == LOST:
        engine.module.model.layers[0].mlp.register_forward_pre_hook(lose)
    cause = None  # pytest.raises would keep the traceback, and the engine with it
    try:
        train(engine, steps=1)
    except LostError:
        abort_process_groups()
    except RuntimeError as error:
        cause = classify(error)
    assert rank == LOST or cause is FailureCause.COMMUNICATION
    return state


def take_part_in_generations(rank: int, _world_size: int, layout: Layout, folder: Path) -> list[dict[str, list[float]]]:
    """The state of each generation's engine, all in the same process."""
    distributed.destroy_process_group()
    baseline = ProcessBaseline.of_this_process()
    found = []
    for generation in range(GENERATIONS):
        found.append(train_until_a_rank_is_lost(rank, layout, folder / str(generation)))
        problem = baseline.restore()
        assert problem is None, problem
    return found


@pytest.mark.parametrize("stage", range(4))
def test_processes_train_again_after_a_loss_as_for_the_first_time(stage: int, tmp_path: Path) -> None:
    states = run_group(2, take_part_in_generations, Layout(stage, 2, "float32"), tmp_path)
    for of_rank in states:
        first, *following = of_rank
        assert following == [first] * (GENERATIONS - 1)


def blocked_in_a_collective(rank: int, _world_size: int) -> str:
    """Class of the error of a rank that waits for another one, which hangs."""
    if rank == LOST:
        time.sleep(2)
        return ""
    threading.Timer(0.5, abort_process_groups).start()
    try:
        distributed.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(classify(error))
    raise AssertionError("the other rank did not take part")


def test_abort_ends_a_collective_whose_peer_hangs() -> None:
    assert run_group(2, blocked_in_a_collective)[1 - LOST] == FailureCause.COMMUNICATION


def problem_with(_rank: int, _world_size: int, what: str) -> str | None:
    """Why a process must not take part in another generation, if this of the last one is left."""
    baseline = ProcessBaseline.of_this_process()
    kept: Any = None
    match what:
        case "model":
            kept = build_model(torch.float32)
        case "thread":
            kept = threading.Thread(target=time.sleep, args=(30,), name="reader", daemon=True)
            kept.start()
        case "mode":
            torch.set_grad_enabled(False)
    problem = baseline.restore()
    del kept
    return problem


@pytest.mark.parametrize(("what", "message"), [("model", "LlamaForCausalLM"), ("thread", "reader"), ("mode", "mode")])
def test_process_with_remains_of_a_generation_is_not_used_again(what: str, message: str) -> None:
    [problem] = run_group(1, problem_with, what)
    assert message in problem


def random_numbers(_rank: int, _world_size: int) -> tuple[float, float]:
    """The next random number of a new process, and of one that has left a generation."""
    baseline = ProcessBaseline.of_this_process()
    first = float(torch.rand(()))
    torch.manual_seed(5)
    assert baseline.restore() is None
    return first, float(torch.rand(()))


def test_random_numbers_are_those_of_a_new_process() -> None:
    [(first, again)] = run_group(1, random_numbers)
    assert first == again
