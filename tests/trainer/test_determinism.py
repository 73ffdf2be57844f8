"""`execution.deterministic` holds for every step, and for nothing that no step depends on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spotune_trainer.determinism import any_kernels, use_deterministic_kernels
from spotune_trainer.failures import describe
from spotune_trainer.task import WorkerTask
from spotune_trainer.worker import Worker
from tests.trainer.groups import run_group
from tests.trainer.runs import Layout, Runs, make_task, start_generation, train_rank


class WatchedWorker(Worker):
    """Looks which kernels are allowed when it commits, and when it is about to export."""

    seen: list[bool]

    def commit(self, step: int) -> None:
        """At the end of a step."""
        self.seen.append(torch.are_deterministic_algorithms_enabled())
        super().commit(step)

    def release(self) -> None:
        """After the last one."""
        self.seen.append(torch.are_deterministic_algorithms_enabled())
        super().release()


def kernels_allowed(rank: int, world_size: int, task: WorkerTask) -> tuple[list[bool], str | None]:
    """What a worker saw in two commits and before its export, and how cuBLAS was set up."""
    WatchedWorker.seen = []
    train_rank(rank, world_size, task, WatchedWorker)
    return WatchedWorker.seen, os.environ.get("CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture
def _restored() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
            patch.setenv(name, "")
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("execution", "expected"),
    [({}, ([False, False, False], None)), ({"deterministic": True}, ([True, True, False], ":4096:8"))],
    ids=["any kernels", "deterministic"],
)
def test_steps_are_trained_with_the_kernels_that_are_asked_for(
    tmp_path: Path, execution: dict[str, bool], expected: tuple[list[bool], str | None]
) -> None:
    runs = Runs(tmp_path)
    directory = runs.empty("watched")
    task = make_task(directory, runs.job(execution=execution), Layout(1, 0), start_generation(directory))
    assert run_group(1, kernels_allowed, task) == [expected]


@pytest.mark.usefixtures("_restored")
def test_an_operation_without_such_a_kernel_is_named_with_the_field() -> None:
    use_deterministic_kernels(True)
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
    assert describe(0, raised.value).message == (
        "execution.deterministic: put_ does not have a deterministic implementation: set it to false, or use another "
        "model"
    )
    with any_kernels():
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
    assert torch.are_deterministic_algorithms_enabled()
