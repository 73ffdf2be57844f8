"""System calls that Python 3.11 does not have: namespaces and mounts. See namespaces(7) and mount(2)."""

import ctypes
import os
from enum import IntFlag
from pathlib import Path

MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace(IntFlag):
    """The kinds of namespaces of a cluster and its nodes (the CLONE_NEW* flags)."""

    MOUNT = 0x00020000
    CGROUP = 0x02000000
    UTS = 0x04000000
    IPC = 0x08000000
    PID = 0x20000000
    NET = 0x40000000


ALL_NAMESPACES = Namespace.MOUNT | Namespace.CGROUP | Namespace.UTS | Namespace.IPC | Namespace.PID | Namespace.NET


class MountFlag(IntFlag):
    """The mount(2) flags used here."""

    READ_ONLY = 1
    REMOUNT = 32
    BIND = 4096
    RECURSIVE = 16384
    PRIVATE = 1 << 18
    SLAVE = 1 << 19
    SHARED = 1 << 20


def unshare(namespaces: Namespace) -> None:
    """Move this process into new namespaces; a new PID namespace starts with its next child."""
    _check(_libc.unshare(int(namespaces)), f"unshare {namespaces!r}")


def enter(pid: int, namespaces: Namespace) -> None:
    """Move this process (for PID: its next child) into the namespaces of process `pid`."""
    pidfd = os.pidfd_open(pid)
    try:
        _check(_libc.setns(pidfd, int(namespaces)), f"setns {namespaces!r} of process {pid}")
    finally:
        os.close(pidfd)


def mount(
    source: Path | str, target: Path | str, kind: str = "", flags: MountFlag | int = 0, options: str = ""
) -> None:
    """Mount a file system or a folder at `target` with the system call mount. An OSError names both paths."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(int(flags)),
        options.encode() or None,
    )
    _check(result, f"mount {kind} {source} on {target}")


def detach(target: Path | str) -> None:
    """Unmount everything at `target` and below, in this namespace."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def bind(source: Path | str, target: Path | str, *, read_only: bool = False) -> None:
    """Bind-mount `source` at `target`."""
    mount(source, target, flags=MountFlag.BIND)
    if read_only:
        mount(source, target, flags=MountFlag.BIND | MountFlag.REMOUNT | MountFlag.READ_ONLY)


def propagate(target: Path | str, how: MountFlag) -> None:
    """Set how later mounts below `target` propagate to other namespaces."""
    mount("none", target, flags=how | MountFlag.RECURSIVE)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
