"""`execution.deterministic` applies to training steps, and to evaluations where a deterministic kernel exists."""

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

from spotune_trainer.engine.determinism import allow_nondeterministic_kernels, use_deterministic_kernels
from spotune_trainer.training.failures import describe
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.training.worker import Worker
from tests.trainer.support.groups import run_group
from tests.trainer.support.runs import Layout, Runs, make_task, start_generation, train_rank

pytestmark = pytest.mark.slow

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")


class WatchedWorker(Worker):
    """Records which kernels are allowed in training, in evaluation and before the export.

    `observed` has one entry for each change: the phase, whether PyTorch uses deterministic kernels only, whether it
    does where they exist, and the compiler's setting.
    """

    observed: list[tuple[str, bool, bool, bool]]

    def set_up(self) -> None:
        """Hook the model's forward passes."""
        super().set_up()
        self.context.engine.module.register_forward_hook(
            lambda module, *_: self.record("training" if module.training else "evaluation")
        )

    def release(self) -> None:
        """Record the setting after the last step."""
        self.record("export")
        super().release()

    def record(self, what: str) -> None:
        """Record the settings of PyTorch and its compiler, if they have changed."""
        enabled, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        found = (what, enabled and not warns, enabled, inductor_config.deterministic)
        if self.observed[-1:] != [found]:
            self.observed.append(found)


def kernels_allowed(rank: int, world_size: int, task: WorkerTask, environment: dict[str, str]) -> tuple[Any, list[Any]]:
    """What a worker recorded, and the environment variables that libraries read."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ |= environment
    WatchedWorker.observed = []
    train_rank(rank, world_size, task, WatchedWorker)
    return WatchedWorker.observed, [os.environ.get(name) for name in VARIABLES]


def put() -> Tensor:
    """An operation without a deterministic kernel on any device."""
    return torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))


@pytest.fixture
def _restored() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.setenv(name, "")
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        yield
    use_deterministic_kernels(enabled=False)


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
def test_training_uses_the_kernels_that_the_job_asks_for(
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
    assert [kernels for what, *kernels in seen if what == "training"] == 2 * [[wanted] * 3]
    assert not any(only for what, only, *_ in seen if what != "training")
    assert [where_possible for what, _, where_possible, _ in seen if what == "evaluation"] == 2 * [wanted]
    assert found == variables


def compiled_histogram() -> Tensor:
    """An operation without a deterministic GPU kernel. The compiler raises the error, though its own kernel is one."""
    with FakeTensorMode():
        counts: Tensor = torch.compile(torch.histc, backend="eager")(torch.empty(3, device="cuda"), 4)
    return counts


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(("function", "operation"), [(put, "put_"), (compiled_histogram, "_histc_cuda")])
def test_the_error_names_the_operation_without_a_deterministic_kernel_and_the_field(
    function: Callable[[], Tensor], operation: str
) -> None:
    use_deterministic_kernels(enabled=True)
    with pytest.raises(RuntimeError) as raised:
        function()
    assert describe(0, raised.value).message == (
        f"execution.deterministic: {operation} does not have a deterministic implementation: set it to false and "
        "execution.reproducible to none, or use another model"
    )


@pytest.mark.usefixtures("_restored")
def test_operations_without_a_deterministic_kernel_are_allowed_in_an_evaluation() -> None:
    use_deterministic_kernels(enabled=True)
    with allow_nondeterministic_kernels():
        put()
    assert torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="put_"):
        put()
