"""The agent of one node: a Ray actor that outlives worker groups and forks the ranks of each.

Starting a rank is slow because of the imports of torch, DeepSpeed and transformers. A fork server on each node imports
them once, while the driver plans. Ranks are processes forked from it, so their exit frees everything they hold: GPU
memory as well as broken process groups. Only the snapshots of their commits stay in memory: the agent owns that.
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
from spotune_trainer.checkpoint.memory.node_memory import NodeMemory, RankMemory
from spotune_trainer.training.task import RankExit, RankPlacement, RankResult, WorkerTask
from spotune_trainer.worker_group.rank_process import has_hung, run_rank

GRACE_SECONDS = 2.0
"""Once a rank has failed, the others have this long to report their own failure; then they are killed."""

_POLL_SECONDS = 0.5
_FORKING = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class NodeInfo:
    """Address and memory of a node.

    Attributes:
        address: IP address that other nodes reach it by.
        memory_bytes: of the node, or of its container.
    """

    address: str
    memory_bytes: int


class NodeAgent:
    """Forks ranks and reports how they exited. Ray calls each method in a thread of its own (see `AgentPool`).

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
        self._memory = NodeMemory()

    def info(self) -> NodeInfo:
        """Address and memory of this node."""
        return NodeInfo(ray.util.get_node_ip_address(), machine_memory_bytes())

    def gpu_memory_bytes(self) -> int:
        """Memory of the node's first GPU. A separate process reads it, so that the agent itself uses no GPU memory."""
        receiver, sender = _FORKING.Pipe(duplex=False)
        _FORKING.Process(target=_send_gpu_memory, args=(sender,)).start()
        sender.close()
        return int(receiver.recv())

    def free_port(self) -> int:
        """A free TCP port of this node."""
        with socket.create_server(("", 0)) as listener:
            return int(listener.getsockname()[1])

    def block_forever(self) -> None:
        """Never returns. A caller that waits for it gets an error as soon as the agent or its node is dead."""
        threading.Event().wait()

    def run_ranks(self, task: WorkerTask, placements: Sequence[RankPlacement]) -> list[RankResult]:
        """Run ranks on this node until all have exited. Once one fails, the others have `GRACE_SECONDS`."""
        memories = self._memory.share(len(placements), task.memory_copies, task.restore)
        ranks = [_Rank(task, place, memory) for place, memory in zip(placements, memories, strict=True)]
        while running := [rank for rank in ranks if rank.status is None]:
            for rank in running:
                rank.poll()
                if rank.status:
                    self.abort(task.generation)
                elif time.monotonic() > self._deadlines.get(task.generation, float("inf")):
                    rank.kill()
            connection.wait([handle for rank in running for handle in rank.wait_handles()], _POLL_SECONDS)
        self._deadlines.pop(task.generation, None)
        results = [rank.result() for rank in ranks]
        if any(result.exit in (RankExit.TRAINED, RankExit.STOPPED) for result in results):  # no group follows
            self._memory.free()
        return results

    def abort(self, generation: int) -> None:
        """A rank of this generation has failed, here or elsewhere: kill the others after `GRACE_SECONDS`."""
        self._deadlines.setdefault(generation, time.monotonic() + GRACE_SECONDS)


class _Rank:
    """The process of a rank, and the result that it sent.

    Attributes:
        status: exit status, negative for a signal; None while it runs.
    """

    def __init__(self, task: WorkerTask, place: RankPlacement, memory: RankMemory | None) -> None:
        self._rank = place.rank
        self._logs = task.logs
        self._reported: RankResult | None = None
        self._receiver, sender = _FORKING.Pipe(duplex=False)
        self._process = _FORKING.Process(target=run_rank, args=(task, place, sender, memory))
        self._process.start()
        sender.close()
        self._killed = False
        self.status: int | None = None

    def wait_handles(self) -> list[Connection | int]:
        """Handles that become readable once `poll` has something to do."""
        return [self._process.sentinel] if self._receiver.closed else [self._process.sentinel, self._receiver]

    def poll(self) -> None:
        """Receive its result, if there is one, and update `status`."""
        status = self._process.exitcode  # read first: the result of an exited process is still in the pipe
        if not self._receiver.closed and self._receiver.poll():
            with suppress(EOFError):
                self._reported = self._receiver.recv()
            self._receiver.close()
        self.status = status

    def kill(self) -> None:
        """Kill the process."""
        self._killed = True
        self._process.kill()

    def result(self) -> RankResult:
        """How the process ended. To be called once `status` is set."""
        assert self.status is not None
        reported = self._reported or RankResult(self._rank, self.status)
        return replace(reported, status=self.status, hung=has_hung(self._logs, self._rank), killed=self._killed)


def _send_gpu_memory(sender: Connection) -> None:
    import torch

    sender.send(torch.cuda.get_device_properties(0).total_memory)
