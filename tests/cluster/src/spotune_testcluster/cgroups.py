"""Control groups (v1, v2 or both at once): one a cluster, one below it a node; what is in it can be killed as one."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from spotune_testcluster import linux

ROOT = Path("/sys/fs/cgroup")
CPUSET = ("cpuset.cpus", "cpuset.mems")


# Left out, all containers stay in the root group of v1's blkio: one limit there slows a volume for everyone at once.
NOT_OURS = "blkio"


def hierarchies() -> dict[Path, tuple[str, str]]:
    """Where control groups are mounted (once on v2, once per controller on v1), with the mount's type and options."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = {Path(where): (kind, options) for _, where, kind, options, *_ in mounts if kind in {"cgroup", "cgroup2"}}
    return {where: found[where] for where in sorted(found) if where.name != NOT_OURS}


def join(group: str) -> None:
    """Move this process into `group` (a path below the hierarchies' roots) everywhere; it is made when missing."""
    for hierarchy in hierarchies():
        directory = hierarchy / group
        directory.mkdir(parents=True, exist_ok=True)
        for name in CPUSET:  # v1's cpuset starts empty, and an empty one takes no process
            setting = directory / name
            if setting.exists() and not setting.read_text().strip():
                setting.write_text((hierarchy / name).read_text())
        (directory / "cgroup.procs").write_text(str(os.getpid()))


def mount_own(found: Mapping[Path, tuple[str, str]]) -> None:
    """In a fresh control group namespace, over an empty /sys: show its group as the root of these hierarchies."""
    if ROOT not in found:
        linux.mount("cgroup", ROOT, "tmpfs", options="mode=755")
    for directory, (kind, options) in found.items():
        directory.mkdir(parents=True, exist_ok=True)
        controllers = "" if kind == "cgroup2" else _controllers(options)
        linux.mount(kind, directory, kind, options=controllers)


def _controllers(options: str) -> str:
    """What to ask of a v1 hierarchy's mount: its controllers, or its name."""
    general = {"rw", "ro", "relatime", "noatime", "nosuid", "nodev", "noexec"}
    kept = [option for option in options.split(",") if option not in general]
    return ",".join(["none", *kept] if any(option.startswith("name=") for option in kept) else kept)


def processes(group: str) -> set[int]:
    """The processes in `group` and the groups below it, by this namespace's process ids."""
    found: set[int] = set()
    for directory in _groups(group):
        try:
            text = (directory / "cgroup.procs").read_text()
        except OSError:  # removed meanwhile
            continue
        found.update(int(line) for line in text.split() if int(line) > 0)
    return found


def kill(group: str, seconds: float = 10) -> None:
    """SIGKILL to all in `group` until none is left; raises TimeoutError when something does not die."""
    end = time.monotonic() + seconds
    while left := processes(group):
        if time.monotonic() > end:
            raise TimeoutError(f"processes {sorted(left)} of {group} do not die")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def remove(group: str, seconds: float = 5) -> None:
    """Remove `group` with all below it from every hierarchy; the kernel lets go of the dead a moment after."""
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
