"""What the kernel says of a process: whether it is dead, and whether anything of it is left (proc_pid_stat(5)).

The kernel marks a process as exiting when it dies, and frees its memory and its files afterwards. With much page-locked
or GPU memory this takes seconds. Only then does the parent learn of it.
"""

from __future__ import annotations

import os
from pathlib import Path

_STATE, _FLAGS, _EXIT_CODE = 0, 6, 49  # positions after the name
_PF_EXITING = 0x4


def status_of_dead(pid: int) -> int | None:
    """Exit status, negative for a signal, of a process that is dead; None if it runs, or if its parent knows it."""
    fields = _fields(pid)
    if len(fields) <= _EXIT_CODE or not int(fields[_FLAGS]) & _PF_EXITING:
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))


def has_ended(pid: int) -> bool:
    """Whether the kernel has freed all that the process had."""
    fields = _fields(pid)
    return not fields or fields[_STATE] in ("Z", "X")


def _fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the name; none if there is no such process."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return content.rpartition(")")[2].split()
