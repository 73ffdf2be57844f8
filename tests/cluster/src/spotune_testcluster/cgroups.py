"""Control groups (v1, v2 or both at once): one a cluster, one below it a node; what is in it can be killed as one."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from spotune_testcluster import linux

ROOT = Path("/sys/fs/cgroup")
CPUSET = ("cpuset.cpus", "cpuset.mems")


def hierarchies() -> list[Path]:
    """Where this machine's control group hierarchies are mounted: one on v2, one per controller on v1."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted({Path(fields[1]) for fields in mounts if fields[2] in {"cgroup", "cgroup2"}})


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


def mount_own() -> None:
    """In a fresh control group namespace: show its group as the root of every hierarchy, at the usual places."""
    fields = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = {Path(line[1]): (line[2], line[3]) for line in fields if line[2] in {"cgroup", "cgroup2"}}
    if ROOT not in found:
        linux.mount("cgroup", ROOT, "tmpfs", options="mode=755")
    for directory, (kind, options) in sorted(found.items()):
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
