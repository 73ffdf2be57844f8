"""Checks that this machine has everything that a cluster needs; the error names the packages to install."""

import os
import shutil
from pathlib import Path

from spotune_testcluster.errors import CannotRunHereError

# program: its Debian package
PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "ipset": "ipset",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "mkfs.xfs": "xfsprogs",
    "xfs_growfs": "xfsprogs",
    "losetup": "mount",
    "nsenter": "util-linux",
    "mmdebstrap": "mmdebstrap",
    "gcc": "gcc",
}
BRIDGE_PLUGIN = Path("/usr/lib/cni/bridge")


def packages() -> list[str]:
    """The Debian packages that a cluster needs, and the Redis of the tests of services."""
    return sorted({*PROGRAMS.values(), "containernetworking-plugins", "libc6-dev", "redis-tools"})


def check() -> None:
    """Raise CannotRunHereError if this machine cannot run a cluster."""
    if os.geteuid() != 0:
        raise CannotRunHereError("nodes need namespaces, mounts and control groups: run as root")
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None}
    if not BRIDGE_PLUGIN.exists():
        missing.add("containernetworking-plugins")
    if missing:
        raise CannotRunHereError(f"missing: apt-get install --no-install-recommends {' '.join(sorted(missing))}")


def check_go() -> None:
    """Raise CannotRunHereError if Kubernetes cannot be built here."""
    if shutil.which("go") is None:
        raise CannotRunHereError("Kubernetes is built from its Go modules: install Go 1.26 or newer")
