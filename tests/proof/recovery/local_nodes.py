"""The nodes of a run on this machine: what lies on each, and how to kill one and let another join in its place."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from spotune_trainer.supervisor.ray_head.local import RunningRay, process_marker
from spotune_trainer.supervisor.ray_head.processes import Process, find_process
from tests.proof import nodes
from tests.trainer.support.live import LiveRun, held_segments, kill

_ATTEMPTS = 3
LOCAL_RAY = process_marker(Path("/")).partition("=")[0]
"""Variable in all processes of a local Ray."""
HEAD = ""
"""Name of the node with Ray's head."""


class LocalNodes:
    """The nodes beside the head of one run, and the head's own part in the group.

    Args:
        run: the command.
        slots: of each node, the head first.
        gpus: whether each slot has a GPU.
    """

    def __init__(self, run: LiveRun, slots: Sequence[int], *, gpus: bool) -> None:
        self._run = run
        self._slots = slots
        self._gpus = gpus
        self._joined: dict[int, nodes.Node] = {}
        self._address = ""
        self._count = 0
        self._joining: list[threading.Thread] = []
        self._errors: list[Exception] = []

    def join_missing(self) -> None:
        """Let a node join for each that is missing, and wait for them. After a new head, all of them are.

        If the run has finished meanwhile, its Ray is gone, and none joins.
        """
        try:
            self._join_missing()
        except (nodes.JoinError, OSError):
            if not self._run.events("finished"):
                raise

    def begin_to_join_missing(self) -> None:
        """The same in the background."""
        thread = threading.Thread(target=self._join_in_background, daemon=True)
        self._joining.append(thread)
        thread.start()

    def wait_until_joined(self) -> None:
        """Wait for the nodes that join.

        Raises:
            RuntimeError: one of them could not.
        """
        for thread in self._joining:
            thread.join()
        self._joining.clear()
        if self._errors:
            raise RuntimeError(f"a node could not join: {self._errors[0]}") from self._errors[0]

    @property
    def slots(self) -> int:
        """Workers that the nodes have room for now."""
        return self._slots[0] + sum(node.slots for node in self._joined.values())

    def by_rank(self) -> dict[int, str]:
        """The node of each running rank."""
        found = {rank: node_of(process.pid) for rank, process in sorted(self._run.ranks().items())}
        return {rank: node for rank, node in found.items() if node is not None}

    def ring(self) -> list[str]:
        """The nodes of the running group, each of which sends to the next one."""
        return list(dict.fromkeys(self.by_rank().values()))

    def after(self, node: str) -> str | None:
        """The next node of the ring; None if there is no other."""
        ring = self.ring()
        following = [*ring[ring.index(node) + 1 :], *ring] if node in ring else ring
        return next((other for other in following if other != node), None)

    def kill(self, node: str) -> None:
        """Kill a node: all of its processes, or those of the head's that have commits in memory."""
        for place, joined in list(self._joined.items()):
            if joined.name == node:
                joined.kill()
                del self._joined[place]
        if node == HEAD:
            for process in self._holders_on_head():
                with suppress(ProcessLookupError):
                    kill(process)

    def _join_missing(self) -> None:
        ray = self._run.ray()
        if ray is None:
            raise nodes.JoinError("the run has no Ray")
        if ray.address != self._address:
            self._joined.clear()
            self._address = ray.address
        for place in range(1, len(self._slots)):
            if place not in self._joined:
                self._joined[place] = self._join(ray, place)

    def _join(self, ray: RunningRay, place: int) -> nodes.Node:
        """Let a node join; on a busy machine, Ray may need another attempt."""
        for attempt in range(1, _ATTEMPTS + 1):
            self._count += 1
            try:
                return nodes.join(ray, self._slots[place], self._count, self._gpus_of(place))
            except nodes.JoinError:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable: the last attempt raises")

    def _holders_on_head(self) -> list[Process]:
        """Agent and ranks of the head, the agent first: ranks that it forks afterwards find nothing in memory."""
        ranks = {process.pid for process in self._run.ranks().values()}
        found = [process for process in holders(self._run.directory.root) if node_of(process.pid) == HEAD]
        return sorted(found, key=lambda process: (process.pid in ranks, process.started))

    def _join_in_background(self) -> None:
        try:
            self.join_missing()
        except Exception as error:  # noqa: BLE001 - raised by `wait_until_joined`
            self._errors.append(error)

    def _gpus_of(self, place: int) -> range:
        """The GPUs of a node: the head takes the first ones of this machine."""
        first = sum(self._slots[:place])
        return range(first, first + self._slots[place]) if self._gpus else range(0)


def node_of(pid: int) -> str | None:
    """The name of the node of a process; None if it has ended, or belongs to no node."""
    entries = _environment(pid)
    return None if entries is None else entries.get(nodes.NODE, HEAD)


def holders(root: Path) -> list[Process]:
    """The processes of a run that have commits in memory: agents, ranks, and what forks these."""
    name, value = process_marker(root).split("=", 1)
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    holding = [process for pid in pids if (process := find_process(pid)) is not None and held_segments(process)]
    return [process for process in holding if (_environment(process.pid) or {}).get(name) == value]


def _environment(pid: int) -> Mapping[str, str] | None:
    """What a process of a local Ray has in its environment; None for any other.

    Ray's workers overwrite their environment in /proc with their titles. Then that of the process counts that started
    them: the raylet of the node.
    """
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return None
        entries = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
        if LOCAL_RAY in entries:
            return entries
        pid = int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))
    return None
