"""Worker groups without Ray: real ranks in a gloo group, forked from a fork server with all imports done."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty
from typing import Any

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "spotune_trainer.worker_group.forkserver_preload",
        "spotune_trainer.training_functions.worker",  # as in an agent of a job with a training function
        "spotune_trainer.commands.worker",
    ]
)
"""Ranks of all tests are forked from here: each would import for a second what is missing."""
_POLL_SECONDS = 0.1
_SECONDS_TO_WRITE_STACKS = 1.0
_OTHER_RANKS_SECONDS = 2
"""For the other ranks to fail as well: the one that is reported first has often lost its peer only."""


class GroupFailedError(Exception):
    """A rank raised; the message has the traceback or exit status of each rank that did."""


def run_group(world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 240.0) -> list[Any]:
    """Call `function(rank, world_size, *arguments)` on every rank of a process group. Returns the results by rank."""
    results = FORKING.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            FORKING.Process(target=_rank, args=(rank, world_size, store, results, function, arguments))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            found: dict[int, Any] = {}
            deadline = time.monotonic() + timeout
            while len(found) < world_size:
                try:
                    rank, value, error = _next(results, ranks, deadline)
                except TimeoutError as late:
                    raise TimeoutError(f"{late}\n{_stacks(ranks, Path(folder))}") from None
                if error is not None:
                    raise GroupFailedError(_failures(results, ranks, {rank: error}, found))
                found[rank] = value
            return [found[rank] for rank in range(world_size)]
        finally:
            for process in ranks:
                process.join(timeout=5 if len(found) == world_size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _stacks(ranks: Sequence[BaseProcess], folder: Path) -> str:
    """What each thread of each rank does now, or the exit status of a rank without a result."""
    for process in ranks:
        if process.pid is not None and process.exitcode is None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(_SECONDS_TO_WRITE_STACKS)
    found: list[str] = []
    for rank, process in enumerate(ranks):
        path = folder / _stack_file(rank)
        stacks = path.read_text() if path.exists() else ""  # a rank that has not begun has no file
        found.append(f"rank {rank}: {stacks or f'no stack, exit status {process.exitcode}'}")
    return "\n".join(found)


def _stack_file(rank: int) -> str:
    return f"stacks-{rank}"


def _failures(results: Any, ranks: Sequence[BaseProcess], errors: dict[int, str], found: dict[int, Any]) -> str:
    """Wait a little for the other ranks to fail. Returns what all of them say; `errors` is what is known by now."""
    deadline = time.monotonic() + _OTHER_RANKS_SECONDS
    missing = set(range(len(ranks))) - errors.keys() - found.keys()
    while missing and time.monotonic() < deadline:
        has_running = any(ranks[rank].exitcode is None for rank in missing)
        try:
            rank, _, error = results.get(timeout=_POLL_SECONDS)
        except Empty:
            if not has_running:  # nobody is left who could say more
                break
            continue
        missing.discard(rank)
        if error is not None:
            errors[rank] = error
    for rank in missing:
        status = ranks[rank].exitcode
        errors[rank] = "still runs" if status is None else f"ended with status {status} and no result"
    return "\n".join(f"rank {rank}: {errors[rank]}" for rank in sorted(errors))


def _next(results: Any, ranks: Sequence[BaseProcess], deadline: float) -> tuple[int, Any, str | None]:
    """Wait for the next result: (rank, value, traceback). A rank that exits without a result counts as an error."""
    while True:
        exited = [(rank, process.exitcode) for rank, process in enumerate(ranks) if process.exitcode]
        try:
            result: tuple[int, Any, str | None] = results.get(timeout=_POLL_SECONDS)
        except Empty:
            if exited:
                rank, status = exited[0]
                return rank, None, f"ended with status {status} and no result"
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks did not exit in time") from None
        else:
            return result


def _rank(
    rank: int, world_size: int, store: str, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    from torch import distributed

    stacks = (Path(store).parent / _stack_file(rank)).open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "DS_ACCELERATOR": "cpu"}
    try:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        value = function(rank, world_size, *arguments)
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    results.put((rank, value, None))
    if distributed.is_initialized():  # a function may have replaced it by groups of its own
        distributed.destroy_process_group()
