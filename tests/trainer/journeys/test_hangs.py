"""A rank that stands still without dying, anywhere: the others end by their guards, and leave their stacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from spotune_trainer.checkpoint import async_checkpointer as committer
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.progress import Journal
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.training.worker import Worker
from spotune_trainer.worker_group.rank_process import has_hung
from tests.trainer.support.groups import GroupFailedError, run_group
from tests.trainer.support.runs import Layout, Runs, make_task, start_generation

HANG_SECONDS = 12.0
PLACES: dict[str, Callable[[Worker], tuple[object, str, int]]] = {
    "set-up": lambda worker: (worker, "set_up", 1),
    "restore": lambda worker: (worker, "_load", 1),
    "first step": lambda worker: (worker, "_ask", 1),
    "later step": lambda worker: (worker, "_ask", 3),
    "last commit": lambda worker: (worker.committer, "begin", 1),
    "end": lambda worker: (worker, "_take_in", 7),
}
"""Object, method and which of its calls, before which the last rank stops; five steps are trained, from step 5 on."""


def train_until(rank: int, world_size: int, task: WorkerTask, place: str) -> None:
    """One rank; the last one stops as a process does that a signal or a system call holds for ever."""
    committer._SLOW_SECONDS = 0.0  # what is slow from the beginning must not hide what does not move at all
    logs = JobDirectory(Path(task.directory)).generation_logs(task.generation)
    with Journal(logs, rank, HANG_SECONDS) as journal:
        worker = Worker(task, rank, world_size, journal)
        if rank == world_size - 1:
            _stop_before(*PLACES[place](worker))
        worker.train()


def patience(rank: int, world_size: int, task: WorkerTask) -> set[float]:
    """Seconds after which a collective of training gives up by itself."""
    logs = JobDirectory(Path(task.directory)).generation_logs(task.generation)
    with Journal(logs, rank, hang_timeout_seconds=600) as journal:
        worker = Worker(task, rank, world_size, journal)
        worker.set_up()
        groups = (distributed.group.WORLD, worker.control, worker.engine.optimizer.dp_process_group)
        backends = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
        return {backend.options._timeout.total_seconds() for backend in backends}


def _stop_before(there: Any, method: str, call: int) -> None:
    original, calls = getattr(there, method), iter(range(1, call + 1))

    def stopping(*arguments: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*arguments)

    setattr(there, method, stopping)


@pytest.mark.parametrize(
    ("place", "waits_in"),
    [
        pytest.param("set-up", "new_group", marks=pytest.mark.long),
        pytest.param("restore", "_agree_on", marks=pytest.mark.long),
        ("first step", "_exchange"),
        pytest.param("later step", "_exchange", marks=pytest.mark.long),
        ("last commit", "finish_commit"),
        pytest.param("end", "_peak_memory_bytes", marks=pytest.mark.long),
    ],
)
def test_who_waits_for_a_rank_that_stands_still_ends_and_says_where(runs: Runs, place: str, waits_in: str) -> None:
    layout = Layout(2, 1)
    directory = runs.interrupted(runs.finished(layout), 5)
    task = make_task(directory, runs.job(), layout, start_generation(directory))
    with pytest.raises(GroupFailedError, match="rank 0: ended with status 1 and no result"):
        run_group(2, train_until, task, place, timeout=90)
    logs = directory.generation_logs(task.generation)
    assert [has_hung(logs, rank) for rank in range(2)] == [True, False]
    stacks = logs.stacks(0).read_text()
    assert stacks.startswith("Timeout")
    assert f" in {waits_in}\n" in stacks


def test_no_collective_gives_up_before_the_guard(runs: Runs) -> None:
    directory, job = runs.empty("patient"), runs.job(retry={"hangTimeout": "2h"})
    task = make_task(directory, job, Layout(2, 2), start_generation(directory))
    assert run_group(2, patience, task) == [{7260.0}, {7260.0}]
