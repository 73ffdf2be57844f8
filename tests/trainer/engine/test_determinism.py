"""`execution.deterministic` holds for every step, and for nothing that no step depends on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode

from spotune_trainer.engine.determinism import any_kernels, use_deterministic_kernels
from spotune_trainer.training.failures import describe
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.training.worker import Worker
from tests.trainer.support.groups import run_group
from tests.trainer.support.runs import Layout, Runs, make_task, start_generation, train_rank

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")


class WatchedWorker(Worker):
    """Looks which kernels are allowed in forward passes of training and of evaluation, and when it is about to export.

    In `seen` each is once in a row, by the name of what it is for.
    """

    seen: list[tuple[str, bool, bool]]

    def set_up(self) -> None:
        """Watch the model's passes."""
        super().set_up()
        self.engine.module.register_forward_hook(
            lambda module, *_: self.look("training" if module.training else "evaluation")
        )

    def release(self) -> None:
        """After the last one."""
        self.look("export")
        super().release()

    def look(self, what: str) -> None:
        """Note what PyTorch and its compiler are set to, where that is news."""
        found = (what, torch.are_deterministic_algorithms_enabled(), inductor_config.deterministic)
        if self.seen[-1:] != [found]:
            self.seen.append(found)


def kernels_allowed(rank: int, world_size: int, task: WorkerTask, environment: dict[str, str]) -> tuple[Any, list[Any]]:
    """What a worker saw, and what the libraries were told by variables."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ |= environment
    WatchedWorker.seen = []
    train_rank(rank, world_size, task, WatchedWorker)
    return WatchedWorker.seen, [os.environ.get(name) for name in VARIABLES]


def put() -> Tensor:
    """For which PyTorch has no deterministic kernel on any device."""
    return torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))


@pytest.fixture
def _restored() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.setenv(name, "")
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        yield
    use_deterministic_kernels(wanted=False)


@pytest.mark.parametrize(
    ("wanted", "environment", "variables"),
    [
        (False, {}, [None, None]),
        (True, {}, [":4096:8", "1"]),
        (True, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, [":16:8", "1"]),
        (True, {"CUBLAS_WORKSPACE_CONFIG": ":4096:2"}, [":4096:8", "1"]),
    ],
    ids=["any kernels", "deterministic", "as the user has it", "as the user must not have it"],
)
def test_steps_are_trained_with_the_kernels_that_are_asked_for(
    tmp_path: Path, wanted: bool, environment: dict[str, str], variables: list[str | None]
) -> None:
    runs = Runs(tmp_path)
    directory = runs.empty("watched")
    job = runs.job(
        dataset={"eval": {"source": str(runs.shards("seq2seq"))}},
        training={"evaluation": {"everySteps": 6}},
        execution={"deterministic": wanted},
    )
    task = make_task(directory, job, Layout(1, 0), start_generation(directory))
    ((seen, found),) = run_group(1, kernels_allowed, task, environment)
    assert [what for what, *_ in seen] == ["training", "evaluation", "training", "evaluation", "export"]
    assert [kernels for what, *kernels in seen if what == "training"] == 2 * [[wanted, wanted]]
    assert not any(pytorch for what, pytorch, _ in seen if what != "training")
    assert found == variables


def compiled_histogram() -> Tensor:
    """For which there is none on GPUs; the compiler says so, and needs none for it."""
    with FakeTensorMode():
        counts: Tensor = torch.compile(torch.histc, backend="eager")(torch.empty(3, device="cuda"), 4)
    return counts


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(("function", "operation"), [(put, "put_"), (compiled_histogram, "_histc_cuda")])
def test_an_operation_without_such_a_kernel_is_named_with_the_field(
    function: Callable[[], Tensor], operation: str
) -> None:
    use_deterministic_kernels(wanted=True)
    with pytest.raises(RuntimeError) as raised:
        function()
    assert describe(0, raised.value).message == (
        f"execution.deterministic: {operation} does not have a deterministic implementation: set it to false, or use "
        "another model"
    )


@pytest.mark.usefixtures("_restored")
def test_what_no_step_depends_on_may_take_any_kernel() -> None:
    use_deterministic_kernels(wanted=True)
    with any_kernels():
        put()
    assert torch.are_deterministic_algorithms_enabled()
