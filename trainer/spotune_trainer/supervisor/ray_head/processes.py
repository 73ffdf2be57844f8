"""Processes of our own on a Linux machine: found again by what a reused pid cannot fake, and ended for certain.

What Ray starts leaves its parent, its process group and often its command line behind, and jobs leave their session
too. Three traces remain: the session of what was started as its leader, an entry of the environment that children
inherit, and the start time that tells a process from a later one with the same number.
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
_LOOK_EVERY_SECONDS = 0.05


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        started: clock ticks from the machine's boot to its start.
    """

    pid: int
    started: int

    def is_alive(self) -> bool:
        """Whether it still runs: a zombie does not, nor does another process with its number."""
        return find_process(self.pid) == self


@dataclass(frozen=True)
class Family:
    """All processes that belong together: members of the session of `leader`, and bearers of an environment entry.

    Attributes:
        leader: what was started as the leader of a session of its own; None where only the mark is known.
        boot: `boot_id()` at that time.
        mark: `NAME=value`, an entry of the environment that was given to the leader and to nobody else.
    """

    leader: Process | None
    boot: str
    mark: str

    def members(self) -> list[Process]:
        """Those that run now, never this process nor its session."""
        if self.boot != boot_id():
            return []
        mark = self.mark.encode()
        others = [entry for entry in _all_processes() if entry.session != os.getsid(0)]
        return [entry.process for entry in others if self._in_session(entry) or _has_mark(entry.process.pid, mark)]

    def end(self, timeout_seconds: float = 10.0) -> None:
        """Kill all members, and those they start meanwhile, until none is left.

        Raises:
            InfrastructureError: some cannot be ended.
        """
        until = time.monotonic() + timeout_seconds
        while members := self.members():
            if time.monotonic() > until:
                pids = ", ".join(str(member.pid) for member in members)
                raise InfrastructureError(f"processes {pids} of an earlier run cannot be ended; end them by hand")
            for member in members:
                _kill(member)
            time.sleep(_LOOK_EVERY_SECONDS)

    def _in_session(self, entry: _Entry) -> bool:
        """Whether a process is in our session. The number of a dead leader is not given away while its session lives.

        Session 0 is that of everything outside our pid namespace, so of strangers.
        """
        if self.leader is None or self.leader.pid <= 1 or entry.session != self.leader.pid:
            return False
        if entry.process.started < self.leader.started:
            return False
        now = find_process(self.leader.pid)
        return now is None or now == self.leader


def boot_id() -> str:
    """What tells one boot of the machine from the next, and so the start times of one from those of the other."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def find_process(pid: int) -> Process | None:
    """The process that has this number now; None where there is none, or only a zombie."""
    entry = _read(pid)
    return entry.process if entry else None


def command_line(process: Process) -> str:
    """Its command and arguments, separated by spaces; empty when it has ended."""
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
    # The second field is the name in brackets and may hold anything; the third begins after the last bracket.
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in _DEAD_STATES:
        return None
    return _Entry(Process(pid, int(fields[19])), int(fields[3]))


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _kill(process: Process) -> None:
    if process.is_alive():
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
