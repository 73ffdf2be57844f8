"""The agent of one node: a Ray actor that outlives worker groups, and forks the ranks of each.

What takes long at the start of a rank is importing torch, DeepSpeed and transformers. A fork server on each node does
that once, while the driver still plans, and the ranks of every generation are forked from it: processes of their own,
which leave nothing behind, neither memory of a GPU nor a broken process group.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection

import ray.util

from spotune.plan.devices import machine_memory_bytes
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.rank_process import Place, RankEnd, has_hung, run_rank

GRACE_SECONDS = 2.0
"""So long may the other ranks say what they saw of it once one has failed; then they are killed."""

_LOOK_EVERY_SECONDS = 0.5
_FORKING = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class NodeFacts:
    """What the driver asks of a node.

    Attributes:
        address: by which other nodes reach it.
        memory_bytes: of the node, or of its container.
    """

    address: str
    memory_bytes: int


class NodeAgent:
    """Forks ranks, and tells how they end; Ray calls its methods in threads of their own.

    Args:
        gpus: whether the ranks train on GPUs.
    """

    def __init__(self, gpus: bool) -> None:
        os.environ["DS_ACCELERATOR"] = "cuda" if gpus else "cpu"
        os.environ["OMP_NUM_THREADS"] = "1"  # a rank has one slot; Ray set as many as the whole node has
        vars(sys.modules["__main__"]).pop("__file__", None)  # or every rank begins by running Ray's worker program
        _FORKING.set_forkserver_preload(["spotune_trainer.worker_group.forkserver_preload"])
        forkserver.ensure_running()
        self._deadlines: dict[int, float] = {}

    def facts(self) -> NodeFacts:
        """What is to be known of this node."""
        return NodeFacts(ray.util.get_node_ip_address(), machine_memory_bytes())

    def gpu_memory_bytes(self) -> int:
        """Memory of the node's first GPU, seen by a process of its own: the agent takes up none of it."""
        receiver, sender = _FORKING.Pipe(duplex=False)
        _FORKING.Process(target=_send_gpu_memory, args=(sender,)).start()
        sender.close()
        return int(receiver.recv())

    def free_port(self) -> int:
        """A port of this node that nobody listens on now."""
        with socket.create_server(("", 0)) as listener:
            return int(listener.getsockname()[1])

    def stay(self) -> None:
        """Never returns: whoever waits for it learns at once that the agent or its node is gone."""
        threading.Event().wait()

    def run(self, task: WorkerTask, places: Sequence[Place]) -> list[RankEnd]:
        """Run the ranks of this node to their end; once one fails, the others have `GRACE_SECONDS`."""
        ranks = [_Rank(task, place) for place in places]
        while running := [rank for rank in ranks if rank.status is None]:
            for rank in running:
                rank.look()
                if rank.status:
                    self.end(task.generation)
                elif time.monotonic() > self._deadlines.get(task.generation, float("inf")):
                    rank.kill()
            connection.wait([waited for rank in running for waited in rank.waited_for()], _LOOK_EVERY_SECONDS)
        self._deadlines.pop(task.generation, None)
        return [rank.end() for rank in ranks]

    def end(self, generation: int) -> None:
        """A rank of this generation has failed: end those of this node in `GRACE_SECONDS`."""
        self._deadlines.setdefault(generation, time.monotonic() + GRACE_SECONDS)


class _Rank:
    """The process of a rank, and what it said.

    Attributes:
        status: exit status, negative for a signal; None while it runs.
    """

    def __init__(self, task: WorkerTask, place: Place) -> None:
        self._rank = place.rank
        self._logs = task.logs
        self._said: RankEnd | None = None
        self._receiver, sender = _FORKING.Pipe(duplex=False)
        self._process = _FORKING.Process(target=run_rank, args=(task, place, sender))
        self._process.start()
        sender.close()
        self._killed = False
        self.status: int | None = None

    def waited_for(self) -> list[Connection | int]:
        """What becomes readable once there is something to see."""
        return [self._process.sentinel] if self._receiver.closed else [self._process.sentinel, self._receiver]

    def look(self) -> None:
        """Take in what it says, and whether it has ended."""
        status = self._process.exitcode  # first: what an ended process has said lies in the pipe
        if not self._receiver.closed and self._receiver.poll():
            with suppress(EOFError):
                self._said = self._receiver.recv()
            self._receiver.close()
        self.status = status

    def kill(self) -> None:
        """End it at once."""
        self._killed = True
        self._process.kill()

    def end(self) -> RankEnd:
        """How it ended, once it has."""
        assert self.status is not None
        said = self._said or RankEnd(self._rank, self.status)
        return replace(said, status=self.status, hung=has_hung(self._logs, self._rank), killed=self._killed)


def _send_gpu_memory(sender: Connection) -> None:
    import torch

    sender.send(torch.cuda.get_device_properties(0).total_memory)
