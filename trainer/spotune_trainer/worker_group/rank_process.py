"""The process of one rank: forked for the node agent, killed with it.

Must be cheap to import: the agent imports it, and must not wait for DeepSpeed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.training.task import RankPlacement, RankResult, WorkerTask

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def has_hung(logs: GenerationLogs, rank: int) -> bool:
    """Whether the watchdog of `rank` dumped its stacks and ended it. To be called on the node of the rank."""
    stacks = logs.stacks(rank)
    return stacks.exists() and stacks.stat().st_size > 0


def run_rank(task: WorkerTask, place: RankPlacement, results: Connection, memory: RankMemory | None = None) -> None:
    """Main function of the process: train, and send the `RankResult` through `results`."""
    _name_and_tie_to_parent(f"spotune-rank-{place.rank}")
    os.environ |= place.environment()
    from spotune_trainer.training.failures import describe
    from spotune_trainer.training.worker import run_worker

    try:
        result = run_worker(task, place.rank, place.world_size, memory)
    except BaseException as error:  # run_worker has logged it in full
        results.send(RankResult(place.rank, 1, failure=describe(place.rank, error)))
        _exit(1)
        raise
    results.send(RankResult(place.rank, 0, result.exit, result.summary))
    _exit(0)


def _exit(status: int) -> None:
    """Exit at once. A regular exit would join the threads of libraries, one of which may block forever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _name_and_tie_to_parent(name: str) -> None:
    """Name this process for `ps`, and have the kernel kill it when the fork server dies."""
    system = ctypes.CDLL(None, use_errno=True)
    system.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
