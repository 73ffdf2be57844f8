"""The nodes of a run that plays a trace: raylets of one slot, which join, are announced to go, and are killed.

Usage, by `Nodes` alone, in the environment of the head:
    python -m benchmarks.trace_nodes join ADDRESS
    python -m benchmarks.trace_nodes drain ADDRESS NODE DEADLINE
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotune_trainer.supervisor.ray_head.local import RunningRay
from spotune_trainer.supervisor.ray_head.processes import ProcessFamily, boot_id, find_process
from tests.proof.nodes import start

_ROOT = Path(__file__).parents[1]
_MARK = "SPOTUNE_TRACE_NODE"
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 600.0
_AT_ONCE = max(1, (os.cpu_count() or 1) // 2)
"""Nodes that start at the same time."""
_START_ATTEMPTS = 3
_PREEMPTION = 2
"""Ray's reason of a drain that nothing may refuse."""


@dataclass
class _Node:
    """A raylet of one slot.

    Attributes:
        mark: entry in the environment of its processes.
        starter: the process that starts it, and then writes its id; None: others start first.
        family: all of its processes; None as long as there are none.
        name: Ray's id; empty while it starts.
        attempts: number of times that it was started: Ray gives up where a start is slow.
        going: whether it was announced to go.
    """

    mark: str
    starter: subprocess.Popen[str] | None = None
    family: ProcessFamily | None = None
    name: str = ""
    attempts: int = 0
    going: bool = False

    def kill(self) -> None:
        """End all of it at once."""
        if self.family is not None:
            self.family.kill()


@dataclass
class Nodes:
    """The nodes beside a head without slots. Of several, the newest is lost first, as `spotune simulate` assumes.

    Attributes:
        ray: the head.
        changes: (seconds since the epoch, nodes that have joined) of every change.
        clock: seconds since the epoch.
    """

    ray: RunningRay
    changes: list[tuple[float, int]] = field(default_factory=list)
    clock: Callable[[], float] = time.time
    _living: list[_Node] = field(default_factory=list)
    _drains: list[subprocess.Popen[str]] = field(default_factory=list)
    _started: int = 0

    def join(self, count: int) -> None:
        """Begin to start nodes; `poll` sees when they have joined."""
        for _ in range(count):
            self._started += 1
            self._living.append(_Node(f"{_MARK}={self.ray.temporary.name}-{self._started}"))
        self.poll()

    def poll(self) -> None:
        """Record the nodes that have joined since the last call, and start those that wait for others.

        Raises:
            RuntimeError: a node could not be started, or Ray refused a notice.
        """
        for drain in [drain for drain in self._drains if drain.poll() is not None]:
            self._drains.remove(drain)
            output, _ = drain.communicate()
            if drain.returncode != 0:
                raise RuntimeError(f"a node could not be announced to go: {output}")
        for node in self._living:
            if node.name or node.starter is None or node.starter.poll() is None:
                continue
            output, _ = node.starter.communicate()
            if node.starter.returncode == 0:
                node.name = output.split()[-1]
                self._record()
            elif node.attempts == _START_ATTEMPTS:
                raise RuntimeError(f"a node could not be started: {output}")
            else:
                node.kill()
                node.starter = None
        waiting = [node for node in self._living if node.starter is None]
        starting = sum(not node.name for node in self._living) - len(waiting)
        for node in waiting[: max(0, _AT_ONCE - starting)]:
            node.attempts += 1
            node.starter = self._command("join", self.ray.address, mark=node.mark)
            node.family = ProcessFamily(find_process(node.starter.pid), boot_id(), node.mark)

    def wait(self) -> None:
        """Wait until all nodes have joined."""
        for node in self._living:
            self._wait_for(node)

    def announce(self, count: int, deadline: float) -> None:
        """Announce that nodes will be lost, as a cloud does.

        Args:
            count: number of nodes.
            deadline: when, in seconds since the epoch.
        """
        staying = [node for node in self._living if not node.going]
        for node in staying[len(staying) - count :]:
            node.going = True
            self._wait_for(node)
            self._drains.append(self._command("drain", self.ray.address, node.name, str(round(deadline * 1000))))

    def kill(self, count: int) -> None:
        """Kill nodes at once: those that were announced to go and, if there are too few, the newest."""
        order = sorted(self._living, key=lambda node: node.going)
        for node in order[len(order) - count :]:
            self._wait_for(node)
            node.kill()
            self._living.remove(node)
        self._record()

    def shut_down(self) -> None:
        """Kill all of them."""
        for node in self._living:
            node.kill()

    def _wait_for(self, node: _Node) -> None:
        """Wait until a node has joined."""
        until = self.clock() + _PATIENCE_SECONDS
        while not node.name:
            self.poll()
            if self.clock() > until:
                raise TimeoutError("a node does not join")
            time.sleep(_POLL_SECONDS)

    def _record(self) -> None:
        self.changes.append((self.clock(), sum(bool(node.name) for node in self._living)))

    def _command(self, *arguments: str, mark: str = "") -> subprocess.Popen[str]:
        """Start this module in the environment of the head: with its token, its temporary folder and its marker."""
        entries = Path(f"/proc/{self.ray.parts['raylet'].pid}/environ").read_text(errors="replace").split("\0")
        environment = dict(entry.split("=", 1) for entry in [*entries, mark] if "=" in entry)
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.trace_nodes", *arguments],
            cwd=_ROOT,
            env=environment | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(_ROOT))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def drain(address: str, node: str, deadline: int) -> None:
    """Announce to Ray that a node will be lost.

    Args:
        address: of the head.
        node: its id.
        deadline: when, in milliseconds since the epoch.
    """
    import ray

    raylet: Any = ray._raylet
    accepted, problem = raylet.GcsClient(address=address).drain_node(node, _PREEMPTION, "spot notice", deadline)
    if not accepted:
        raise RuntimeError(f"Ray refuses to drain a node: {problem}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["join", address]:
            print(start(address, slots=1, gpus=0))
        case ["drain", address, node, deadline]:
            drain(address, node, int(deadline))
