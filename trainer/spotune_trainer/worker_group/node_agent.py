"""The agent of one node: forks the ranks of each worker group, and outlives Ray and the driver.

Starting a rank is slow because of the imports of torch, DeepSpeed and transformers. A fork server on each node imports
them once, while the driver plans. Ranks are processes forked from it, so their exit frees everything they hold: GPU
memory as well as broken process groups. Only the snapshots of their commits stay in memory: the agent owns that. It
also copies them to the agent of another node, and keeps the copies of a third one's.

The agent lives in a process of its own (`agent_daemon.py`), which drivers reach through a Ray actor
(`node_proxy.py`). If the head is lost, its ranks train on, and the next driver finds them here.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection

from spotune.errors import InfrastructureError
from spotune.plan.devices import machine_memory_bytes
from spotune_trainer.checkpoint.layout import newest_complete
from spotune_trainer.checkpoint.memory.node_memory import NodeMemory, RankMemory
from spotune_trainer.checkpoint.memory.peer_connection import PeerAddress
from spotune_trainer.checkpoint.memory.peer_copies import PeerCopies
from spotune_trainer.checkpoint.memory.peer_reader import PeerReader
from spotune_trainer.checkpoint.memory.peer_sender import PeerSender
from spotune_trainer.checkpoint.memory.peer_server import PeerServer
from spotune_trainer.job_directory.node_name import NODE_NAME, boot_id, node_name
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.observability.logs.line_format import logging_to_file
from spotune_trainer.training.task import RankExit, RankPlacement, RankResult, WorkerTask
from spotune_trainer.worker_group.fitness.links import pull_rate
from spotune_trainer.worker_group.fitness.measure import measure_in_process
from spotune_trainer.worker_group.fitness.measurements import NodeMeasurement
from spotune_trainer.worker_group.node_state import NodeAddresses, NodeGroup, NodeInfo, OtherNodes
from spotune_trainer.worker_group.rank_process import FORKING, Assignment, RankHandle

logger = logging.getLogger("spotune.worker")

GRACE_SECONDS = 2.0
"""Once a rank has failed, the others have this long to report their own failure; then they are killed."""
GRACE_SECONDS_OF_KEPT = 5.0
"""The same where processes are kept, which have more to do: to leave the generation."""

_POLL_SECONDS = 0.1
_EXIT_SECONDS = 10.0
"""Killed processes end within this time, even if they have to free much memory."""


@dataclass
class _Run:
    """A generation on this node: from the fork of its ranks until the next generation.

    Attributes:
        group: its ranks.
        driver: id of the driver that waits for the results.
        results: of its ranks; None before all have ended.
        is_to_leave: whether its ranks were asked to commit and leave.
        ended: set once no rank takes part any more.
    """

    group: NodeGroup
    driver: str
    results: list[RankResult] | None = None
    is_to_leave: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class NodeAgent:
    """Forks ranks and reports how they exited. Thread-safe: each call of a driver has a thread of its own.

    Args:
        address: IP address by which other nodes reach this one.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._deadlines: dict[int, float] = {}
        self._secret = b""
        self._driver = ""
        self._memory = NodeMemory()
        self._copies = PeerCopies()
        self._server: PeerServer | None = None
        self._standing_by: dict[int, RankHandle] = {}
        self._keeps = False
        self._run: _Run | None = None

    def set_driver(self, driver: str, secret: bytes) -> None:
        """Serve another driver from now on.

        Args:
            driver: its id.
            secret: by which the agents and ranks of its worker groups know each other. A group that runs keeps the one
                that it started with.
        """
        self._driver, self._secret = driver, secret
        if not self.is_running:
            self._serve_peers()

    @property
    def is_running(self) -> bool:
        """Whether ranks take part in a generation."""
        return self._run is not None and not self._run.ended.is_set()

    @property
    def is_left(self) -> bool:
        """Whether ranks take part in a generation for which the present driver does not wait."""
        return self.is_running and self._run is not None and self._run.driver != self._driver

    @property
    def has_trained(self) -> bool:
        """Whether the last ranks have trained to the end."""
        results = self._run.results if self._run is not None else None
        return bool(results) and all(result.exit is RankExit.TRAINED for result in results or ())

    def group(self) -> NodeGroup | None:
        """The ranks of the last generation, which run or whose results the driver can still get; None before any."""
        return self._run.group if self._run is not None else None

    def info(self) -> NodeInfo:
        """Address and memory of this node."""
        peer = self._server.address if self._server is not None else None
        memory = machine_memory_bytes()
        return NodeInfo(self._address, memory, peer, node_name(), boot_id(), NODE_NAME in os.environ)

    def import_modules(self) -> None:
        """Returns once a new rank need not wait for the imports of the fork server."""
        process = FORKING.Process(target=_do_nothing)
        process.start()
        process.join()

    def gpu_memory_bytes(self) -> int:
        """Memory of the node's first GPU. A separate process reads it, so that the agent itself uses no GPU memory.

        Raises:
            InfrastructureError: the GPU cannot be used.
        """
        receiver, sender = FORKING.Pipe(duplex=False)
        FORKING.Process(target=_send_gpu_memory, args=(sender,)).start()
        sender.close()
        try:
            answer: int | str = receiver.recv()
        except EOFError:
            answer = "the process that reads its memory was killed"
        if isinstance(answer, str):
            raise InfrastructureError(f"the GPU of node {self._address} cannot be used: {answer}")
        return answer

    def measure(self, gpus: bool) -> NodeMeasurement | None:
        """Check the devices of this node; None if ranks use them.

        Args:
            gpus: whether ranks train on GPUs.
        """
        return None if self.is_running else measure_in_process(FORKING, gpus)

    def pull_rates(self, peers: Sequence[PeerAddress]) -> list[float | None]:
        """Bytes per second that this node gets from each of these agents, one after the other; see `pull_rate`."""
        return [pull_rate(peer, self._secret) for peer in peers]

    def free_port(self) -> int:
        """A free TCP port of this node."""
        with socket.create_server(("", 0)) as listener:
            return int(listener.getsockname()[1])

    def run_ranks(
        self,
        task: WorkerTask,
        placements: Sequence[RankPlacement],
        addresses: NodeAddresses,
        *,
        keep: bool = False,
        reuse: bool = False,
    ) -> list[RankResult]:
        """Run ranks on this node until none takes part any more. Once one fails, the others have a grace period.

        Args:
            task: of the generation.
            placements: of the ranks.
            addresses: of the agents whose memory the ranks may read, and to one of which commits are copied.
            keep: let processes wait for another generation, if a rank is lost elsewhere or the group yields.
            reuse: use processes that wait since an earlier generation; otherwise fork them all.

        Raises:
            InfrastructureError: ranks of an earlier generation cannot be killed.
        """
        if not self.kill_ranks():  # of an earlier driver
            raise InfrastructureError(
                f"the ranks of an earlier worker group on {self._address} were killed and do not end: is its volume or "
                "GPU stuck?"
            )
        self._keeps = keep
        run = self._run = _Run(NodeGroup(task, tuple(placements)), self._driver)
        try:
            run.results = self._run_until_exit(run, addresses.others_of(placements[0].node), reuse=reuse)
        finally:
            run.ended.set()
            self._serve_peers()
        return run.results

    def wait_for_ranks(self, generation: int) -> list[RankResult]:
        """Wait for the ranks of a generation that an earlier driver has started; returns their results.

        Raises:
            LookupError: this node does not have them.
        """
        run = self._run
        if run is None or run.group.task.generation != generation:
            raise LookupError(f"there are no ranks of generation {generation} on this node")
        run.driver = self._driver
        run.ended.wait()
        if run.results is None:
            raise LookupError(f"the ranks of generation {generation} could not be started")
        return run.results

    def leave(self, seconds: float | None, reason: str) -> None:
        """Let the group of the ranks that run commit and leave. Only the first call of a generation has an effect.

        Args:
            seconds: until when it has to have left; None: at once, without a deadline.
            reason: for its log.

        Raises:
            OSError: the notice could not be written; a later call tries again.
        """
        run = self._run
        if run is not None and not run.ended.is_set() and not run.is_to_leave:
            notice = run.group.task.logs.agent_notice
            notice.parent.mkdir(parents=True, exist_ok=True)
            write_notice(notice, seconds=seconds, reason=reason, leave=True)
            run.is_to_leave = True

    def kill_ranks(self) -> bool:
        """Kill the ranks that run, and wait for their end. Returns whether none is left."""
        run = self._run
        if run is None or run.ended.is_set():
            return True
        self._deadlines[run.group.task.generation] = time.monotonic()
        return run.ended.wait(_EXIT_SECONDS)

    def _run_until_exit(self, run: _Run, others: OtherNodes, *, reuse: bool) -> list[RankResult]:
        task, placements, keep = run.group.task, run.group.placements, self._keeps
        with self._copying_commits(task, placements, others):
            memories = self._share_memory(task, len(placements), others)
            ranks = self._start_ranks(
                [Assignment(task, place, memory, keep) for place, memory in zip(placements, memories, strict=True)],
                reuse=reuse,
            )
            self._wait_for(ranks, run)
        results = [rank.result() for rank in ranks]
        self._standing_by |= {rank.local_rank: rank for rank in ranks if rank.is_kept}
        if any(result.exit in (RankExit.TRAINED, RankExit.STOPPED) for result in results):  # no group follows
            self._memory.free()
            self._copies.free()
        return results

    def _share_memory(self, task: WorkerTask, ranks: int, others: OtherNodes) -> list[RankMemory | None]:
        """The memory of each rank: its own segments, those of the node, and access to other nodes'."""
        copies = self._copies.begin(task.generation, task.restore if task.memory_copies else None)
        memories = self._memory.share(
            ranks, task.memory_copies, task.restore, copies, others_are_replaced=_sends(task, others)
        )
        for memory in memories:
            if memory is not None and others.peers:
                memory.peers = PeerReader(others.peers, self._secret, ranks)
        return memories

    @contextmanager
    def _copying_commits(
        self, task: WorkerTask, placements: Sequence[RankPlacement], others: OtherNodes
    ) -> Iterator[None]:
        """Copy each complete commit to the next node meanwhile. What happens to the copies is in a rank's log."""
        if not _sends(task, others):
            yield
            return
        assert others.next is not None
        complete = partial(newest_complete, task.job_directory.checkpoints, task.generation)
        sender = PeerSender(
            self._memory, task.generation, complete, others.next, self._secret, bytes_per_second=task.peer_copy_rate
        )
        with ExitStack() as stack:
            with suppress(OSError):  # the volume is needed for the log only
                task.logs.root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(logging_to_file(task.logs.worker(placements[0].rank)))
            sender.start()
            stack.callback(sender.stop)
            yield

    def _serve_peers(self) -> None:
        """Let the agents and ranks of the present driver read this node's memory."""
        if self._server is not None:
            self._server.secret = self._secret
            return
        try:
            self._server = PeerServer(self._address, self._secret, self._memory, self._copies)
        except OSError as error:
            logger.warning("other nodes cannot read the memory of this one: %s", error)

    def _wait_for(self, ranks: Sequence[RankHandle], run: _Run) -> None:
        """Wait until no rank takes part in the generation any more."""
        task = run.group.task
        while running := [rank for rank in ranks if rank.status is None]:
            for rank in running:
                rank.poll()
                if rank.status:
                    run.group = replace(run.group, has_failed=True)
                    self.abort(task.generation, lost=rank.result().is_lost)
            deadline = self._deadlines.get(task.generation)
            if deadline is not None:
                is_over = time.monotonic() >= deadline
                for rank in (rank for rank in running if rank.status is None):
                    if is_over:
                        rank.kill()
                    else:
                        rank.abort()
            if handles := [handle for rank in running if rank.status is None for handle in rank.wait_handles()]:
                connection.wait(handles, _POLL_SECONDS)
        self._deadlines.pop(task.generation, None)

    def _start_ranks(self, assignments: Sequence[Assignment], *, reuse: bool) -> list[RankHandle]:
        """Start each rank in the process that had its local rank before, or in a new one. Ends all other processes."""
        kept = self._standing_by if reuse else {}
        unused, self._standing_by = self._standing_by, {}
        ranks = []
        for assignment in assignments:
            rank = kept.get(assignment.place.local_rank)
            if rank is not None and rank.assign(assignment):
                del unused[rank.local_rank]
                ranks.append(rank)
            else:
                ranks.append(RankHandle(assignment))
        for rank in unused.values():
            rank.kill()
        return ranks

    def abort(self, generation: int, *, lost: bool = False) -> None:
        """A rank of this generation has failed, here or elsewhere: the others leave it within a grace period.

        Args:
            generation: of the rank.
            lost: the rank or its node is gone. Then the others know nothing of the cause, and have no grace period
                unless their processes are kept.
        """
        grace_seconds = GRACE_SECONDS_OF_KEPT if self._keeps else 0.0 if lost else GRACE_SECONDS
        deadline = time.monotonic() + grace_seconds
        self._deadlines[generation] = min(deadline, self._deadlines.get(generation, deadline))


def _sends(task: WorkerTask, others: OtherNodes) -> bool:
    """Whether nodes copy their commits in this generation."""
    return others.next is not None and task.memory_copies > 0 and task.peer_copy_rate > 0


def _do_nothing() -> None:
    """What a process does that only waits for the imports of the fork server."""


def _send_gpu_memory(sender: Connection) -> None:
    import torch

    try:
        sender.send(torch.cuda.get_device_properties(0).total_memory)
    except Exception as error:  # noqa: BLE001 - raised by the agent
        sender.send(str(error))
