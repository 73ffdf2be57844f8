"""A rank hangs without dying: the other ranks exit by their watchdogs, and log their stacks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from spotune_trainer.checkpoint import async_checkpointer
from spotune_trainer.checkpoint.async_checkpointer import AsyncCheckpointer
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.checkpointing import Checkpointing
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.training.worker import Worker
from spotune_trainer.worker_group.rank_process import has_hung
from tests.trainer.support.groups import GroupFailedError, run_group
from tests.trainer.support.runs import Layout, Runs, make_task, start_generation

pytestmark = pytest.mark.slow

HANG_SECONDS = 12.0
PLACES: dict[str, tuple[type, str, int]] = {
    "set-up": (Worker, "set_up", 1),
    "restore": (Checkpointing, "_load", 1),
    "first step": (Worker, "propose_flags", 1),
    "later step": (Worker, "propose_flags", 3),
    "last commit": (AsyncCheckpointer, "save", 1),
    "end": (Checkpointing, "_record", 7),
}
"""Class, method, and the number of the call before which the last rank hangs; steps 6 to 10 are trained."""


def train_with_hang(rank: int, world_size: int, task: WorkerTask, place: str) -> None:
    """Train one rank. The last rank stops at `place`, as in a system call that never returns."""
    async_checkpointer._SLOW_SECONDS = 0.0  # a commit that is slow from the start must not hide one that hangs
    logs = JobDirectory(Path(task.directory)).generation_logs(task.generation)
    with ProgressReporter(logs, rank, HANG_SECONDS) as reporter:
        worker = Worker(task, rank, world_size, reporter)
        if rank == world_size - 1:
            _stop_before(*PLACES[place])
        worker.train()


def collective_timeouts(rank: int, world_size: int, task: WorkerTask) -> set[float]:
    """Timeouts of the collectives in training, in seconds."""
    logs = JobDirectory(Path(task.directory)).generation_logs(task.generation)
    with ProgressReporter(logs, rank, hang_timeout_seconds=600) as reporter:
        worker = Worker(task, rank, world_size, reporter)
        worker.set_up()
        groups = (distributed.group.WORLD, worker.context.control, worker.context.engine.optimizer.dp_process_group)
        backends = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
        return {backend.options._timeout.total_seconds() for backend in backends}


def _stop_before(kind: type, method: str, call: int) -> None:
    original, calls = getattr(kind, method), iter(range(1, call + 1))

    def stopping(*arguments: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*arguments)

    setattr(kind, method, stopping)


@pytest.mark.parametrize(
    ("place", "waits_in"),
    [
        pytest.param("set-up", "new_group", marks=pytest.mark.long),
        pytest.param("restore", "_agree_on", marks=pytest.mark.long),
        pytest.param("first step", "_all_reduce", marks=pytest.mark.long),
        pytest.param("later step", "_all_reduce", marks=pytest.mark.long),
        ("last commit", "finish_commit"),
        pytest.param("end", "_peak_memory_bytes", marks=pytest.mark.long),
    ],
)
def test_ranks_that_wait_for_a_hung_rank_exit_and_log_where(runs: Runs, place: str, waits_in: str) -> None:
    layout = Layout(2, 1)
    directory = runs.interrupted(runs.finished(layout), 5)
    task = make_task(directory, runs.job(), layout, start_generation(directory))
    with pytest.raises(GroupFailedError, match="rank 0: ended with status 1 and no result"):
        run_group(2, train_with_hang, task, place, timeout=90)
    logs = directory.generation_logs(task.generation)
    assert [has_hung(logs, rank) for rank in range(2)] == [True, False]
    stacks = logs.stacks(0).read_text()
    assert stacks.startswith("Timeout")
    assert f" in {waits_in}\n" in stacks


def test_no_collective_times_out_before_the_watchdog(runs: Runs) -> None:
    directory, job = runs.empty("patient"), runs.job(retry={"hangTimeout": "2h"})
    task = make_task(directory, job, Layout(2, 2), start_generation(directory))
    assert run_group(2, collective_timeouts, task) == [{7260.0}, {7260.0}]
