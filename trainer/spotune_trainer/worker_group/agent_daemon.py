"""The process of a node's agent. It outlives the Ray actor that starts it, the driver and the head.

A driver attaches to it (`agent_link.py`). While it has none, its ranks train on, and it waits for the next one:

    ranks run, no driver        they train on; after `ORPHAN_SECONDS` they commit and leave
    a later generation began    it kills its ranks: they are superseded
    no ranks run, no driver     it keeps their results and the last commit, and ends after `IDLE_SECONDS`

`node_proxy.py` starts it with the path of its socket, its address, and perhaps `--gpus` and `--functions`.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spotune_trainer.bucket.link import link_of
from spotune_trainer.worker_group.agent_link import ATTACH, DESCRIBE, EXIT, AgentState

if TYPE_CHECKING:
    from spotune_trainer.worker_group.node_agent import NodeAgent

logger = logging.getLogger("spotune.worker")

PROCESS_NAME = "spotune-agent"
ORPHAN_SECONDS = 540.0
"""Ranks without a driver train on for so long. KubeRay restarts a worker container without a raylet after 600 s."""
IDLE_SECONDS = 300.0
"""An agent without a driver and without ranks ends after so long. Until then the last commit is in its memory."""

_CHECK_SECONDS = 1.0
_REQUEST_SECONDS = 5.0
"""How often an agent looks for a later generation in a bucket."""
_BACKLOG = 64
_PR_SET_NAME = 15
_METHODS = frozenset(
    {
        *("info", "import_modules", "gpu_memory_bytes", "free_port", "measure", "pull_rates"),
        *("group", "run_ranks", "wait_for_ranks", "kill_ranks", "abort", "leave"),
    }
)


def main(arguments: list[str] | None = None) -> None:
    """Run an agent in the background. Returns never in its process, and at once in the one that starts it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("socket", type=Path)
    parser.add_argument("address")
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--functions", action="store_true")
    options = parser.parse_args(arguments)
    if os.fork():
        os._exit(0)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, PROCESS_NAME.encode(), 0, 0, 0)
    os.environ["DS_ACCELERATOR"] = "cuda" if options.gpus else "cpu"
    os.environ["OMP_NUM_THREADS"] = "1"  # a rank has one slot; Ray set as many as the whole node has
    of_functions = ["spotune_trainer.training_functions.worker"] if options.functions else []
    forkserver.set_forkserver_preload(["spotune_trainer.worker_group.forkserver_preload", *of_functions])
    forkserver.ensure_running()  # its imports take longer than those of this process

    from spotune_trainer.worker_group.node_agent import NodeAgent

    AgentDaemon(NodeAgent(options.address), options.socket, gpus=options.gpus).run()


class AgentDaemon:
    """Serves an agent at a socket, and ends when nobody needs it any more.

    Args:
        agent: to serve.
        path: of the socket.
        gpus: whether its ranks train on GPUs.
        clock: seconds, monotonic.
    """

    def __init__(
        self, agent: NodeAgent, path: Path, *, gpus: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._agent = agent
        self._path = path
        self._gpus = gpus
        self._clock = clock
        self._lock = threading.Lock()
        self._attached: Connection | None = None
        self._driver = ""
        self._without_driver_since = clock()
        self._ran_until = float("-inf")
        self._fence_checked = float("-inf")

    def run(self) -> None:
        """Serve until nobody needs the agent, then exit."""
        draft = self._path.with_suffix(".new")
        listener = Listener(str(draft), "AF_UNIX", backlog=_BACKLOG)
        draft.rename(self._path)  # whoever finds it can connect at once
        threading.Thread(target=self._accept, args=(listener,), name="requests", daemon=True).start()
        while not self.check():
            time.sleep(_CHECK_SECONDS)
        self._exit()

    def check(self) -> bool:
        """Whether nobody needs the agent any more. Ends ranks that were superseded or are without a driver for long."""
        now = self._clock()
        with self._lock:
            alone = None if self._attached is not None else now - self._without_driver_since
        if alone is None and not self._agent.is_left:
            return False
        group = self._agent.group()
        if self._agent.is_running and group is not None:
            self._ran_until = now
            try:
                self._check_ranks(group, alone)
            except OSError as error:  # the volume is not available for a while
                logger.debug("the group could not be checked: %s", error)
            return False
        return alone is not None and min(alone, now - self._ran_until) > IDLE_SECONDS

    def _check_ranks(self, group: Any, alone: float | None) -> None:
        from spotune_trainer.checkpoint.generations import is_superseded

        if alone is not None and alone > ORPHAN_SECONDS:
            self._agent.leave(None, f"the worker group has been without a driver for {alone:.0f} s")
        task = group.task
        interval = _CHECK_SECONDS if link_of(task.job_directory) is None else _REQUEST_SECONDS
        if self._clock() - self._fence_checked >= interval:
            self._fence_checked = self._clock()
            if is_superseded(task.job_directory, task.generation):
                self._agent.kill_ranks()

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:  # too many open files, or a client that has gone
                time.sleep(_CHECK_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="request", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer the request of a connection. A caller that has gone changes nothing: its ranks run on."""
        with connection, suppress(EOFError, OSError):
            method, args, kwargs = connection.recv()
            if method == ATTACH:
                self._serve_driver(connection, *args)
                return
            error, value = None, None
            try:
                value = self._call(method, args, kwargs)
            except Exception as raised:  # noqa: BLE001 - raised again where the method was called
                error = raised
            connection.send((error, value))

    def _call(self, method: str, args: Any, kwargs: Any) -> Any:
        if method == DESCRIBE:
            return self._describe()
        if method == EXIT:
            self._exit()
        if method not in _METHODS:
            raise AttributeError(f"an agent has no method {method}")
        return getattr(self._agent, method)(*args, **kwargs)

    def _describe(self) -> AgentState:
        group = self._agent.group()
        ranks = len(group.placements) if group is not None and self._agent.is_running else 0
        with self._lock:
            driver = self._driver if self._attached is not None else ""
        return AgentState(
            self._gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), ranks, driver, has_trained=self._agent.has_trained
        )

    def _serve_driver(self, connection: Connection, driver: str, secret: bytes) -> None:
        """Belong to a driver until the connection ends. A later driver takes the agent over from an earlier one."""
        with self._lock:
            accepted = self._attached is None or self._driver != driver
            if accepted:
                if self._attached is not None:
                    _disconnect(self._attached)
                self._attached, self._driver = connection, driver
                self._agent.set_driver(driver, secret)
        try:
            connection.send((None, accepted))
            while accepted:
                connection.recv()
        except (EOFError, OSError):
            pass
        finally:
            with self._lock:
                if self._attached is connection:
                    self._attached = None
                    self._without_driver_since = self._clock()

    def _exit(self) -> NoReturn:
        self._path.unlink(missing_ok=True)
        os._exit(0)  # the fork server ends with this process, and the ranks with it


def _disconnect(connection: Connection) -> None:
    """End a connection, also for a thread that waits for its next message."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)
