"""Find and kill all processes that were started for one purpose on a Linux machine, even detached ones.

Processes that Ray starts leave their parent, their process group and often their command line; jobs also leave their
session. Three things still identify them: the session of the process that was started as its leader, an environment
entry that children inherit, and the start time, which distinguishes a process from a later one with the same pid.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spotune.errors import InfrastructureError

_PROC = Path("/proc")
_DEAD_STATES = frozenset("ZX")
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        started: clock ticks between the boot of the machine and the start of the process.
    """

    pid: int
    started: int

    def is_alive(self) -> bool:
        """Whether it still runs. Neither a zombie nor another process with the same pid counts."""
        return find_process(self.pid) == self


@dataclass(frozen=True)
class ProcessFamily:
    """The processes of the session of `leader`, and all processes with a certain environment entry.

    Attributes:
        leader: the process that was started as the leader of its own session; None where only the marker is known.
        boot: `boot_id()` when the leader was started.
        marker: `NAME=value`, an environment entry that only the leader was started with.
    """

    leader: Process | None
    boot: str
    marker: str

    def members(self, spared: str = "") -> list[Process]:
        """The members that run now, without the session of the calling process.

        Args:
            spared: environment entry of processes that are left out.
        """
        if self.boot != boot_id():
            return []
        marker = self.marker.encode()
        others = [entry for entry in _all_processes() if entry.session != os.getsid(0)]
        found = [entry.process for entry in others if self._in_session(entry) or _has_marker(entry.process.pid, marker)]
        return [process for process in found if not (spared and _has_marker(process.pid, spared.encode()))]

    def kill(self, timeout_seconds: float = 10.0, *, spared: str = "") -> None:
        """Kill all members, and processes that they start meanwhile, until none is left.

        Args:
            timeout_seconds: see below.
            spared: environment entry of processes that are left alone.

        Raises:
            InfrastructureError: some members still run after `timeout_seconds`.
        """
        until = time.monotonic() + timeout_seconds
        while members := self.members(spared):
            if time.monotonic() > until:
                pids = ", ".join(str(member.pid) for member in members)
                raise InfrastructureError(f"processes {pids} of an earlier run cannot be killed: end them by hand")
            for member in members:
                _kill(member)
            time.sleep(_POLL_SECONDS)

    def _in_session(self, entry: _Entry) -> bool:
        """Whether a process is in the leader's session.

        Linux does not reuse the pid of a dead leader while its session has members. Session 0 contains all
        processes outside this pid namespace, so it is never a family.
        """
        if self.leader is None or self.leader.pid <= 1 or entry.session != self.leader.pid:
            return False
        if entry.process.started < self.leader.started:
            return False
        now = find_process(self.leader.pid)
        return now is None or now == self.leader


def boot_id() -> str:
    """Identifier of this boot of the machine; start times are comparable only within one boot."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def find_process(pid: int) -> Process | None:
    """The process with this pid now; None where there is none, or only a zombie."""
    entry = _read(pid)
    return entry.process if entry else None


def command_line(process: Process) -> str:
    """Command and arguments of a process, separated by spaces; empty once it has ended."""
    try:
        return (_PROC / str(process.pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class _Entry:
    process: Process
    session: int


def _all_processes() -> list[_Entry]:
    numbers: Iterable[int] = (int(path.name) for path in _PROC.iterdir() if path.name.isdigit())
    return [entry for entry in map(_read, numbers) if entry]


def _read(pid: int) -> _Entry | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the name in brackets, which may contain any text. The third begins after the last bracket.
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in _DEAD_STATES:
        return None
    return _Entry(Process(pid, int(fields[19])), int(fields[3]))


def _has_marker(pid: int, marker: bytes) -> bool:
    try:
        return marker in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _kill(process: Process) -> None:
    if process.is_alive():
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
