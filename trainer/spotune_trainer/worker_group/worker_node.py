"""The first process of a worker pod: runs Ray, and keeps the pod alive while ranks train without it.

Usage, as the command of the container:
    python -m spotune_trainer.worker_group.worker_node

KubeRay passes the command that starts Ray as an environment variable. A raylet that has lost its head ends. If ranks
run then, this process waits for the next head and starts Ray again: ranks do not notice. It does the same if they have
trained to the end, which their agent has to tell the next driver. Otherwise it exits with the status of Ray, and the
kubelet starts the container anew.

At SIGTERM, Ray drains its node: the driver lets the ranks commit and leave. Without a driver, this process does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from spotune_trainer.worker_group.agent_link import DESCRIBE, AgentGoneError, AgentState, all_agents, call

RAY_COMMAND = "KUBERAY_GEN_RAY_START_CMD"
RAY_ADDRESS = "RAY_ADDRESS"
"""Environment variables that KubeRay sets: the command, and host and port of the head's GCS."""

_POLL_SECONDS = 0.2
_PROBE_SECONDS = 2.0
_RETRY_SECONDS = 1.0
_PR_SET_CHILD_SUBREAPER = 36


def agents_to_keep() -> list[tuple[Path, AgentState]]:
    """The agents of this pod that run ranks, or whose ranks have trained to the end, with their sockets."""
    found = []
    for path in all_agents():
        with suppress(AgentGoneError):
            state: AgentState = call(path, DESCRIBE)
            if state.ranks or state.has_trained:
                found.append((path, state))
    return found


class WorkerNode:
    """Runs Ray until it ends and no agent is to be kept, or until SIGTERM.

    Args:
        command: that starts Ray and lasts as long as its raylet.
        head: host and port of the head's GCS.
        grace_seconds: from SIGTERM until the ranks have to have left.
        agents: returns the agents that the next driver needs.
        log: writes a line for people.
    """

    def __init__(
        self,
        command: Sequence[str],
        head: tuple[str, int],
        grace_seconds: float,
        agents: Callable[[], list[tuple[Path, AgentState]]] = agents_to_keep,
        log: Callable[[str], None] = lambda line: print(line, flush=True),  # noqa: T201 - the container's log
    ) -> None:
        self._command = command
        self._head = head
        self._grace_seconds = grace_seconds
        self._agents = agents
        self._log = log
        self._ray: subprocess.Popen[bytes] | None = None
        self._terminated_at: float | None = None

    def run(self) -> int:
        """Run to the end; returns the exit status of the container."""
        signal.signal(signal.SIGTERM, self._terminate)
        while True:
            status = self._run_ray()
            if not self._is_terminated() and (kept := self._agents()):
                what = "ranks train on" if any(state.ranks for _, state in kept) else "the ranks have trained the model"
                self._log(f"Ray has ended, and {what}: waiting for the next head")
                while not self._is_terminated() and not self._head_answers() and self._agents():
                    self._sleep(_RETRY_SECONDS)
                if not self._is_terminated():
                    continue
            if self._is_terminated():
                self._wait_until_ranks_have_left()
            return status

    def _is_terminated(self) -> bool:
        return self._terminated_at is not None

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        self._terminated_at = self._terminated_at or time.monotonic()
        if self._ray is not None and self._ray.poll() is None:
            self._ray.terminate()

    def _run_ray(self) -> int:
        """Start Ray and wait for its end; returns its exit status."""
        self._ray = subprocess.Popen(self._command)
        if self._terminated_at is not None:  # the signal came before there was a process to pass it to
            self._ray.terminate()
        while (status := self._ray.poll()) is None:
            if self._terminated_at is not None:
                self._let_orphans_leave()
            self._sleep(_POLL_SECONDS)
        return status

    def _wait_until_ranks_have_left(self) -> None:
        """Ray has ended after SIGTERM: let ranks that still run commit and leave, for as long as the pod may last."""
        assert self._terminated_at is not None
        while time.monotonic() < self._terminated_at + self._grace_seconds and self._let_orphans_leave():
            self._sleep(_POLL_SECONDS)

    def _let_orphans_leave(self) -> bool:
        """Ask ranks without a driver to commit and leave. Returns whether any ranks run."""
        agents = [(path, state) for path, state in self._agents() if state.ranks]
        assert self._terminated_at is not None
        left = self._terminated_at + self._grace_seconds - time.monotonic()
        for path, state in agents:
            if not state.driver:
                with suppress(AgentGoneError, OSError):  # a full volume: the next call tries again
                    call(path, "leave", left, "a worker's pod is about to end")
        return bool(agents)

    def _head_answers(self) -> bool:
        with suppress(OSError), socket.create_connection(self._head, _PROBE_SECONDS):
            return True
        return False

    def _sleep(self, seconds: float) -> None:
        """Wait, and reap processes that have lost their parent."""
        time.sleep(seconds)
        with suppress(ChildProcessError):
            while True:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None or (self._ray is not None and found.si_pid == self._ray.pid):
                    return
                os.waitpid(found.si_pid, os.WNOHANG)


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Entry point of the container."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # as process 1 does
    host, _, port = environment[RAY_ADDRESS].rpartition(":")
    command = ["bash", "-c", f"ulimit -n 65536; exec {environment[RAY_COMMAND]}"]
    grace = float(environment.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0"))
    return WorkerNode(command, (host, int(port)), grace).run()


if __name__ == "__main__":
    sys.exit(main())
