"""Control groups (v1, v2 or both at once): one per cluster, and one below it per node, to kill all processes in it."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from spotune_testcluster import linux

ROOT = Path("/sys/fs/cgroup")
CPUSET = ("cpuset.cpus", "cpuset.mems")


# Not used, so that all containers are in the root group of v1's blkio: one limit there slows a volume for all of them.
NOT_OURS = "blkio"


def hierarchies() -> dict[Path, tuple[str, str]]:
    """Mount points of control groups (one on v2, one per controller on v1), with the type and options of each mount."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = {Path(where): (kind, options) for _, where, kind, options, *_ in mounts if kind in {"cgroup", "cgroup2"}}
    return {where: found[where] for where in sorted(found) if where.name != NOT_OURS}


def join(group: str) -> None:
    """Move this process into `group`, a path below the root of each hierarchy. A missing group is created."""
    for hierarchy in hierarchies():
        directory = hierarchy / group
        directory.mkdir(parents=True, exist_ok=True)
        for name in CPUSET:  # a new v1 cpuset is empty, and rejects processes until it is set
            setting = directory / name
            if setting.exists() and not setting.read_text().strip():
                setting.write_text((hierarchy / name).read_text())
        (directory / "cgroup.procs").write_text(str(os.getpid()))


def mount_own(found: Mapping[Path, tuple[str, str]]) -> None:
    """In a new control group namespace, with a new /sys: mount these hierarchies with its group as their root."""
    if ROOT not in found:
        linux.mount("cgroup", ROOT, "tmpfs", options="mode=755")
    for directory, (kind, options) in found.items():
        directory.mkdir(parents=True, exist_ok=True)
        controllers = "" if kind == "cgroup2" else _controllers(options)
        linux.mount(kind, directory, kind, options=controllers)


def _controllers(options: str) -> str:
    """Mount options of a v1 hierarchy: its controllers, or its name."""
    general = {"rw", "ro", "relatime", "noatime", "nosuid", "nodev", "noexec"}
    kept = [option for option in options.split(",") if option not in general]
    return ",".join(["none", *kept] if any(option.startswith("name=") for option in kept) else kept)


def processes(group: str) -> set[int]:
    """The processes in `group` and the groups below it, as process ids of this namespace."""
    found: set[int] = set()
    for directory in _groups(group):
        try:
            text = (directory / "cgroup.procs").read_text()
        except OSError:  # removed meanwhile
            continue
        found.update(int(line) for line in text.split() if int(line) > 0)
    return found


def kill(group: str, seconds: float = 10) -> None:
    """Send SIGKILL to all processes in `group` until none is left. Raises TimeoutError if one does not exit."""
    end = time.monotonic() + seconds
    while left := processes(group):
        if time.monotonic() > end:
            raise TimeoutError(f"processes {sorted(left)} of {group} do not exit after SIGKILL")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def remove(group: str, seconds: float = 5) -> None:
    """Remove `group` and all groups below it. It retries, because the kernel releases dead processes with a delay."""
    end = time.monotonic() + seconds
    while groups := sorted(_groups(group), key=lambda directory: len(directory.parts), reverse=True):
        for directory in groups:
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                if time.monotonic() > end:
                    raise
        time.sleep(0.01)


def _groups(group: str) -> Iterator[Path]:
    for hierarchy in hierarchies():
        for directory, _, _ in os.walk(hierarchy / group):
            yield Path(directory)
