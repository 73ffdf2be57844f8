"""First steps of every init: private mounts, so that no mount or setting inside affects the host."""

import os
import socket
from pathlib import Path

from spotune_testcluster import cgroups, linux

# The kubelet sets these for the whole machine. It gets bind-mounted files with its values; the machine keeps its own.
GLOBAL_SETTINGS = {"kernel/panic": "10", "kernel/panic_on_oops": "1", "vm/overcommit_memory": "1"}


def settle(hostname: str) -> None:
    """Set up new namespaces as a separate machine: mounts, /proc, /sys, /run, control groups, hostname."""
    linux.propagate("/", linux.MountFlag.SLAVE)
    linux.mount("proc", "/proc", "proc")
    hierarchies = cgroups.hierarchies()
    linux.detach("/sys")
    linux.mount("sysfs", "/sys", "sysfs")
    cgroups.mount_own(hierarchies)
    linux.mount("run", "/run", "tmpfs", options="mode=755")
    for name, value in GLOBAL_SETTINGS.items():
        shown = Path("/run") / name.replace("/", "-")
        shown.write_text(f"{value}\n")
        linux.bind(shown, f"/proc/sys/{name}")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    socket.sethostname(hostname)
    os.environ.update({"HOSTNAME": hostname, "HOME": "/root"})


def resolve_by(text: str) -> None:
    """Replace the content of /etc/resolv.conf by `text`."""
    shown = Path("/run/resolv.conf")
    shown.write_text(text)
    linux.bind(shown, "/etc/resolv.conf")
