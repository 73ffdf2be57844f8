"""The process of one rank: forked for the node agent, ends with it.

A process may take part in several generations. When its group has lost a rank, or has yielded, it aborts its
collectives, frees the engine and everything else of the generation, and waits for its next `Assignment`: imports, the
CUDA context and warm libraries stay. A process that cannot return to a clean state exits, and another one is forked.

Must be cheap to import: the agent imports it, and must not wait for DeepSpeed.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from spotune.errors import SpotuneError
from spotune.retry import FailureCause
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.observability.logs.line_format import logging_to_file
from spotune_trainer.training.task import RankExit, RankFailure, RankPlacement, RankResult, WorkerTask

if TYPE_CHECKING:
    from spotune_trainer.engine.teardown import ProcessBaseline
    from spotune_trainer.training.worker import TrainResult

logger = logging.getLogger("spotune.worker")

STANDBY_SECONDS = 300.0
"""How long a process waits for its next generation; then it exits."""

FORKING = multiprocessing.get_context("forkserver")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


@dataclass(frozen=True)
class Assignment:
    """The agent's request to take part in a generation.

    Attributes:
        task: of the generation.
        place: of the process in its group.
        memory: its share of the node's shared memory.
        keep: whether the process may wait for another generation afterwards.
    """

    task: WorkerTask
    place: RankPlacement
    memory: RankMemory | None
    keep: bool


@dataclass(frozen=True)
class Abort:
    """The agent's notice that another rank of this generation has failed: leave it."""

    generation: int


class RankHandle:
    """The process of a rank, as its agent sees it, and the result of its last generation.

    Attributes:
        status: of the result; None while the process takes part in a generation.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._connection, theirs = FORKING.Pipe()
        self._assignment = assignment
        self._reported: RankResult | None = None
        self._aborted = self._killed = False
        self.status: int | None = None
        self._process = FORKING.Process(target=run_rank, args=(theirs, assignment))
        self._process.start()
        theirs.close()

    @property
    def local_rank(self) -> int:
        """Its place on the node, which is also that of its GPU."""
        return self._assignment.place.local_rank

    @property
    def is_kept(self) -> bool:
        """Whether the process waits for another generation."""
        return self._reported is not None and self._reported.is_kept and not self._killed

    def assign(self, assignment: Assignment) -> bool:
        """Let the waiting process take part in another generation. Returns False if it has exited."""
        if self._process.exitcode is not None:
            return False
        try:
            self._connection.send(assignment)
        except OSError:
            return False
        self._assignment = assignment
        self._reported = self.status = None
        self._aborted = False
        return True

    def wait_handles(self) -> list[Connection | int]:
        """Handles that become readable once `poll` has something to do."""
        ended = self._process.sentinel
        return [ended] if self._connection.closed or self._reported else [ended, self._connection]

    def poll(self) -> None:
        """Receive its result, if there is one, and update `status`."""
        status = self._process.exitcode  # read first: the result of an exited process is still in the pipe
        if self._reported is None and not self._connection.closed and self._connection.poll():
            try:
                self._reported = self._connection.recv()
            except (EOFError, OSError):
                self._connection.close()
        self.status = self._reported.status if self._reported and self.is_kept else status

    def abort(self) -> None:
        """Tell the process that another rank of its generation has failed."""
        if not self._aborted:
            self._aborted = True
            with suppress(OSError):
                self._connection.send(Abort(self._assignment.task.generation))

    def kill(self) -> None:
        """Kill the process."""
        self._killed = True
        self._process.kill()

    def result(self) -> RankResult:
        """How its part in the generation ended. To be called once `status` is set."""
        assert self.status is not None
        rank, logs = self._assignment.place.rank, self._assignment.task.logs
        reported = self._reported or RankResult(rank, self.status)
        return replace(reported, status=self.status, hung=has_hung(logs, rank), killed=self._killed)


def has_hung(logs: GenerationLogs, rank: int) -> bool:
    """Whether the watchdog of `rank` dumped its stacks and ended it. To be called on the node of the rank."""
    stacks = logs.stacks(rank)
    return stacks.exists() and stacks.stat().st_size > 0


def run_rank(agent: Connection, assignment: Assignment) -> None:
    """Main function of the process: train in one generation after the other, and send a `RankResult` for each.

    Args:
        agent: connection to the agent, which sends `Abort` and further `Assignment`s.
        assignment: the first one.
    """
    _tie_to_parent()
    messages = _Messages(agent, lambda: os.kill(os.getpid(), signal.SIGKILL))
    from spotune_trainer.engine.teardown import ProcessBaseline

    baseline = ProcessBaseline.of_this_process()
    while True:
        result = _take_part(assignment, messages, baseline)
        agent.send(result)
        if not result.is_kept:
            _exit(result.status)
        following = messages.next_assignment(STANDBY_SECONDS)
        if following is None:
            _exit(1)
        assert following is not None
        assignment = following


class _Messages:
    """Receives the agent's messages in a thread, since the main thread may be blocked in a collective.

    Args:
        agent: connection to the agent.
        on_lost_agent: called once the agent has ended.
    """

    def __init__(self, agent: Connection, on_lost_agent: Callable[[], None]) -> None:
        self._agent = agent
        self._on_lost_agent = on_lost_agent
        self._assignments: queue.SimpleQueue[Assignment] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._generation: int | None = None
        self._aborted: int | None = None
        threading.Thread(target=self._receive, name="agent", daemon=True).start()

    def next_assignment(self, timeout_seconds: float) -> Assignment | None:
        """Wait for the next assignment; None if there is none in time."""
        try:
            return self._assignments.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def begin(self, generation: int) -> None:
        """From now on an `Abort` of this generation aborts the collectives of this process."""
        with self._lock:
            self._generation = generation

    def end(self) -> bool:
        """From now on no `Abort` has an effect. Returns whether the generation has been aborted."""
        with self._lock:
            generation, self._generation = self._generation, None
            return generation is not None and self._aborted == generation

    def _receive(self) -> None:
        while True:
            try:
                message = self._agent.recv()
            except (EOFError, OSError):
                self._on_lost_agent()
                return
            if isinstance(message, Assignment):
                self._assignments.put(message)
            elif isinstance(message, Abort):
                self._abort(message.generation)

    def _abort(self, generation: int) -> None:
        from spotune_trainer.engine.teardown import abort_process_groups

        with self._lock:
            if generation == self._generation:
                self._aborted = generation
                abort_process_groups()


def _take_part(assignment: Assignment, messages: _Messages, baseline: ProcessBaseline) -> RankResult:
    """Train in one generation. If the process can take part in another one, nothing of this one is left in it."""
    task, place = assignment.task, assignment.place
    _set_name(f"spotune-rank-{place.rank}")
    os.environ |= place.environment()
    from spotune_trainer.training.failures import describe

    trained: TrainResult | None = None
    failure: RankFailure | None = None
    is_own = False
    if assignment.keep:
        messages.begin(task.generation)
    try:
        trained = _train(assignment)
    except BaseException as error:  # noqa: BLE001 - run_worker has logged it in full
        failure = describe(place.rank, error)
        is_own = isinstance(error, SpotuneError | MemoryError)
    was_aborted = messages.end()
    if failure is None:
        assert trained is not None
        result = RankResult(place.rank, 0, trained.exit, trained.summary)
        may_be_kept = trained.exit is RankExit.YIELDED
    else:
        if was_aborted and not is_own and failure.cause != FailureCause.OUT_OF_MEMORY:
            failure = replace(failure, cause=str(FailureCause.COMMUNICATION))
        result = RankResult(place.rank, 1, failure=failure)
        may_be_kept = failure.cause == FailureCause.COMMUNICATION
    # The state of the compiler is not known well enough, nor that of a user's code.
    runs_user_code = task.has_function or task.has_command
    may_be_kept = may_be_kept and assignment.keep and not task.plan["compile"] and not runs_user_code
    del assignment
    return replace(result, is_kept=may_be_kept and _is_clean(baseline, task.logs, place.rank))


def _train(assignment: Assignment) -> TrainResult:
    """Train by spotune's loop, or by the job's own function or command."""
    task, place = assignment.task, assignment.place
    if task.has_function:
        from spotune_trainer.training_functions.worker import run_function

        return run_function(task, place)
    if task.has_command:
        from spotune_trainer.commands.worker import run_command

        return run_command(task, place)
    from spotune_trainer.training.worker import run_worker

    return run_worker(task, place.rank, place.world_size, assignment.memory)


def _is_clean(baseline: ProcessBaseline, logs: GenerationLogs, rank: int) -> bool:
    """Whether nothing of the generation is left in this process, which is freed first."""
    with logging_to_file(logs.worker(rank)):
        try:
            problem = baseline.restore()
        except Exception:
            logger.exception("rank %d cannot leave the generation: the process exits", rank)
            return False
        if problem is None:
            logger.info("rank %d has left the generation: the process waits for the next one", rank)
        else:
            logger.info("rank %d has left the generation: the process exits, because %s", rank, problem)
    return problem is None


def _exit(status: int) -> None:
    """Exit at once. A regular exit would join the threads of libraries, one of which may block forever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _set_name(name: str) -> None:
    """Name this process for `ps`."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _tie_to_parent() -> None:
    """Have the kernel kill this process when the fork server dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
