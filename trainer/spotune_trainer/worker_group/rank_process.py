"""One rank of a worker group: a process that the agent of its node forks, and that ends with it.

Light to import: the agent imports it, too, which should not wait for DeepSpeed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.training.task import Ending, WorkerTask

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


@dataclass(frozen=True)
class Place:
    """Where a rank stands in its group, and on its node.

    Attributes:
        rank: 0-based, over the whole group.
        local_rank: 0-based among the ranks of its node; the number of its GPU there.
        local_world_size: ranks on its node.
        world_size: ranks of the group.
        address: of rank 0's node.
        port: there, free for the group's rendezvous.
    """

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    address: str
    port: int

    def environment(self) -> dict[str, str]:
        """The variables by which torch and DeepSpeed know it, as torchrun sets them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True)
class RankFailure:
    """Why one rank failed.

    Attributes:
        cause: a `FailureCause`, or None for a cause of another kind (superseded, a corrupt checkpoint).
        kind: the exception's class.
        message: one line for people.
        details: the traceback.
        checkpoint: the checkpoint that turned out to be corrupt.
    """

    rank: int
    cause: str | None
    kind: str
    message: str
    details: str
    checkpoint: str | None = None


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        status: exit status of its process, negative for a signal.
        ending: what it came to; None where it failed or was killed.
        figures: of the run, from rank 0 of a group that trained to the end.
        failure: why it failed, where it could say so.
        hung: its hang guard ended it.
        killed: its agent ended it, because another one had failed.
    """

    rank: int
    status: int
    ending: Ending | None = None
    figures: dict[str, Any] | None = None
    failure: RankFailure | None = None
    hung: bool = False
    killed: bool = False


def has_hung(logs: GenerationLogs, rank: int) -> bool:
    """Whether the hang guard of `rank` dumped its stacks and ended it; to be asked on its own node."""
    stacks = logs.stacks(rank)
    return stacks.exists() and stacks.stat().st_size > 0


def run_rank(task: WorkerTask, place: Place, said: Connection) -> None:
    """Main function of the process: train, and say through `said` what came of it."""
    _name_and_tie_to_parent(f"spotune-rank-{place.rank}")
    os.environ |= place.environment()
    from spotune_trainer.training.failures import describe
    from spotune_trainer.training.worker import run_worker

    try:
        ended = run_worker(task, place.rank, place.world_size)
    except BaseException as error:  # the rank's log has it in full
        said.send(RankEnd(place.rank, 1, failure=describe(place.rank, error)))
        _leave(1)
        raise
    said.send(RankEnd(place.rank, 0, ended.ending, ended.figures))
    _leave(0)


def _leave(status: int) -> None:
    """End at once: an orderly end joins the threads of libraries, and one of those may wait for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _name_and_tie_to_parent(name: str) -> None:
    """Give this process a name for `ps` and `pkill`, and have it killed once the fork server is gone, busy or not."""
    system = ctypes.CDLL(None, use_errno=True)
    system.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
