"""Ranks of jobs with a training function, without Ray and without a driver: real processes, real commits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spotune.job import FinetuneJob
from spotune_testcluster.cluster import free_port
from spotune_trainer.checkpoint.generations import choose_checkpoint, claim
from spotune_trainer.driver.planning import plan_run
from spotune_trainer.job_directory.job import put_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.task import RankPlacement, WorkerTask
from tests.trainer.support.groups import FORKING

FOLDER = Path(__file__).parent
_SECONDS = 180
_GRACE_SECONDS = 5
"""For ranks after one that has failed; then they are killed, as by a node agent."""


def function_job(function: str, config: dict[str, Any], module: str = "functions", **sections: Any) -> FinetuneJob:
    """A job that calls a function of `functions.py`, or of another module of this folder or of `support/`."""
    code = FOLDER if (FOLDER / f"{module}.py").exists() else FOLDER / "support"
    training = {"function": f"{module}:{function}", "code": str(code), "config": config}
    spec = {"training": training, "workers": {"count": 2, "gpus": 0}, **sections}
    return FinetuneJob.model_validate({"metadata": {"name": "own"}, "spec": spec})


def next_task(directory: JobDirectory, job: FinetuneJob) -> WorkerTask:
    """Claim the next generation, as a driver does."""
    put_job(directory, job)
    checkpoint = choose_checkpoint(directory).checkpoint
    plan = plan_run(job, directory, checkpoint, lambda: 0)
    name = checkpoint.name if checkpoint else None
    generation = claim(directory, name)
    return WorkerTask(
        str(directory.root),
        generation.number,
        str(name) if name else None,
        job.model_dump(mode="json"),
        plan.to_json(),
    )


def command_job(*command: str, code: Path, config: dict[str, Any] | None = None, **sections: Any) -> FinetuneJob:
    """A job that runs a command in a folder."""
    training = {"command": list(command), "code": str(code), "config": config or {}}
    spec = {"training": training, "workers": {"count": 2, "gpus": 0}, **sections}
    return FinetuneJob.model_validate({"metadata": {"name": "own"}, "spec": spec})


def run_generation(
    directory: JobDirectory,
    job: FinetuneJob,
    world_size: int = 2,
    nodes: int = 1,
    homes: Sequence[JobDirectory] = (),
    endpoints: Mapping[int, str] = MappingProxyType({}),
) -> tuple[WorkerTask, list[Any]]:
    """Run one generation. Returns its task, and of each rank (exit, summary), or the error, or its exit status.

    Args:
        directory: of the job, as the driver has it.
        job: the job.
        world_size: number of ranks.
        nodes: number of nodes, which share the directory.
        homes: directories of the nodes, if they share nothing but a bucket.
        endpoints: the URL of the bucket's server, by rank, for ranks that have another one.
    """
    task = next_task(directory, job)
    nodes = len(homes) or nodes
    access = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "S3_"))}
    port, pipes, ranks = free_port(), [], []
    for rank in range(world_size):
        receiver, sender = FORKING.Pipe(duplex=False)
        of_node = world_size // nodes
        place = RankPlacement(
            rank, rank % of_node, of_node, world_size, "127.0.0.1", port, node=rank // of_node, nodes=nodes
        )
        task_of_node = replace(task, directory=str(homes[place.node].root)) if homes else task
        of_rank = {"S3_ENDPOINT_URL": endpoints[rank]} if rank in endpoints else {}
        process = FORKING.Process(target=_rank, args=(task_of_node, place, sender, access | of_rank))
        process.start()
        sender.close()
        pipes.append(receiver)
        ranks.append(process)
    found: list[Any] = []
    for process, pipe in zip(ranks, pipes, strict=True):
        has_failed = any(not isinstance(each, tuple) for each in found)
        try:
            found.append(pipe.recv() if pipe.poll(_GRACE_SECONDS if has_failed else _SECONDS) else "no answer")
        except EOFError:
            process.join(_SECONDS)
            found.append(process.exitcode)
    for process in ranks:
        process.kill()
        process.join()
    return task, found


def run_disturbed(
    directory: JobDirectory,
    job: FinetuneJob,
    disturb: Callable[[], None],
    world_size: int = 2,
    nodes: int = 1,
    homes: Sequence[JobDirectory] = (),
    endpoints: Mapping[int, str] = MappingProxyType({}),
) -> tuple[WorkerTask, list[Any]]:
    """As `run_generation`, while `disturb` runs in a thread."""
    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    found = run_generation(directory, job, world_size, nodes, homes, endpoints)
    thread.join(_SECONDS)
    assert not thread.is_alive(), f"it was not disturbed: {found}"
    return found


def run_superseded(directory: JobDirectory, job: FinetuneJob) -> list[Any]:
    """Run one generation, and claim the next one after its first commit. Returns what became of each rank."""

    def supersede() -> None:
        wait_for_commit(directory)
        claim(directory, None)

    return run_disturbed(directory, job, supersede)[1]


def wait_for_commit(directory: JobDirectory) -> None:
    """Wait for the first commit."""
    while not choose_checkpoint(directory).checkpoint:
        time.sleep(0.05)


def _rank(task: WorkerTask, place: RankPlacement, results: Any, access: Mapping[str, str]) -> None:
    import torch

    from spotune_trainer.commands.worker import run_command
    from spotune_trainer.training_functions.worker import run_function

    torch.set_num_threads(1)
    os.environ |= {**place.environment(), **access}
    try:
        result = run_command(task, place) if task.has_command else run_function(task, place)
    except BaseException as error:
        results.send(error)
        raise
    results.send((result.exit, result.summary))
