"""The state of the machine that a test cluster could change."""

import re
import subprocess
from pathlib import Path

# Settings that change independently of the test cluster.
RESTLESS = re.compile(
    r"random|ns_last_pid|^fs\.|nf_conntrack_count|pty\.nr|sched_domain|net\.netfilter\.nf_log|net\.core\.netdev_rss_key"
)
COMMANDS = {
    "links": ("ip", "-oneline", "link"),
    "addresses": ("ip", "-oneline", "-4", "address"),
    "routes": ("ip", "route", "show", "table", "all"),
    "nftables": ("nft", "list", "ruleset"),
    "iptables": ("iptables", "--list-rules"),
    "sets": ("ipset", "list", "-name"),
    "loop devices": ("losetup", "--list", "--noheadings"),
}
PROGRAMS = ("kube-", "kubelet", "etcd", "containerd", "coredns", "ray-operator", "spotune_testcluster", "provisioner")
NAMESPACED_FOLDERS = ("/run", "/var/lib", "/var/log", "/dev")


def snapshot() -> dict[str, set[str]]:
    """All processes, mounts, links, addresses, routes, rules, control groups, kernel settings and loop devices."""
    found = {name: _lines(*command) for name, command in COMMANDS.items()}
    found["mounts"] = set(Path("/proc/self/mounts").read_text().splitlines())
    found["control groups"] = {str(path) for path in Path("/sys/fs/cgroup").rglob("*") if path.is_dir()}
    found["kernel settings"] = {line for line in _lines("sysctl", "--all") if not RESTLESS.search(line)}
    throttles = Path("/sys/fs/cgroup/blkio").glob("blkio.throttle.*_device")
    found["throttles"] = {line for path in throttles for line in path.read_text().splitlines()}
    processes = _lines("ps", "-e", "-o", "pid,args")
    found["processes"] = {line for line in processes if any(name in line for name in PROGRAMS)}
    for folder in NAMESPACED_FOLDERS:
        found[folder] = {path.name for path in Path(folder).iterdir()}
    return found


def difference(before: dict[str, set[str]], after: dict[str, set[str]]) -> dict[str, set[str]]:
    """The entries that are in only one of two snapshots, by kind; empty if nothing changed."""
    changed = {kind: before[kind] ^ after[kind] for kind in before}
    return {kind: lines for kind, lines in changed.items() if lines}


def _lines(*command: str) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {re.sub(r"\s+", " ", line).strip() for line in done.stdout.splitlines() if line.strip()}
