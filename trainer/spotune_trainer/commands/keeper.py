"""Run a program, and leave no process of it behind.

Usage: python -m spotune_trainer.commands.keeper PROGRAM [ARGUMENT]...

It exits with the program's exit status, or 128 + n if signal n has killed it. SIGTERM is passed on, also to what a
shell or launcher leaves behind when it ends by it. Otherwise, once the program ends, or the standard input is closed
because the process that started this one has ended, all processes that the program has started are killed: launchers
leave theirs behind when they are killed.

Imports the standard library alone: it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run a command; returns its exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
    is_terminating = threading.Event()

    def pass_on(*_: object) -> None:
        is_terminating.set()
        for child in _children():
            _send(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    program = os.posix_spawnp(
        command[0],
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsigdef=[signal.SIGTERM],
    )
    if is_terminating.is_set():  # since before there was a program
        _send(program, signal.SIGTERM)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    status = _wait(program)
    if is_terminating.is_set():
        _let_children_exit()
    _kill_children()
    return status


def _wait(program: int) -> int:
    """Wait for the program, and reap other processes meanwhile."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def _let_children_exit() -> None:
    """Let the processes that a launcher or shell has left behind end, too, which SIGTERM has not reached."""
    for child in _children():
        _send(child, signal.SIGTERM)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _exit_with_parent() -> None:
    """Kill everything once the standard input is closed."""
    with suppress(OSError):
        while os.read(0, 1):
            pass
    _kill_children()
    os._exit(1)


def _kill_children() -> None:
    """Kill the children of this process until there are none: those of a killed one become its own."""
    while children := _children():
        for child in children:
            _send(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """The processes whose parent is this one, except for those that have ended."""
    mine, found = os.getpid(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(parent) == mine and state != "Z":
                found.append(int(entry.name))
    return found


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
