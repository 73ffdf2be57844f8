"""What `scale.py` counts: CPU time and memory of processes, and requests to the API server by who makes them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spotune_testcluster import cgroups
from spotune_testcluster.cluster import Cluster

_CONTROL_PLANE: Final = ("kube-apiserver", "etcd", "ray-operator")
_OPERATOR: Final = ("spotune-operator", "kopf")
_OF_THE_BENCHMARK: Final = {"create finetunejobs", "create modelservices", "create rayjobs", "create rayservices"}


def usage(pid: int) -> dict[str, float]:
    """Memory and CPU time that a process has used so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "residentMiB": round(int(fields["VmRSS"].split()[0]) / 1024, 1),
        "peakMiB": round(int(fields["VmHWM"].split()[0]) / 1024, 1),
        "cpuSeconds": cpu_seconds(pid),
    }


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return round((int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"), 2)


def control_plane(cluster: Cluster) -> dict[str, float]:
    """CPU seconds of the API server, of etcd and of KubeRay's operator so far."""
    found = {}
    for pid in cgroups.processes(cluster.files.group):
        name = Path(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()).name
        if name in _CONTROL_PLANE:
            found[name] = cpu_seconds(pid)
    return found


class Audit:
    """Requests to the API server since this object was created, from the server's audit log.

    The server begins a new log file after 200 MB, so the old ones are read, too.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._before = {path.stat().st_ino: path.stat().st_size for path in self._files()}

    def calls(self) -> dict[str, dict[str, int]]:
        """By who makes them (the operator or KubeRay's), then by verb and kind; a watch counts when it starts."""
        counted: dict[str, Counter[str]] = {}
        for path in self._files():
            with path.open() as lines:
                lines.seek(self._before.get(path.stat().st_ino, 0))
                for line in lines:
                    event = json.loads(line)
                    client = _client(event)
                    call = f"{event['verb']} {event.get('objectRef', {}).get('resource', event['requestURI'])}"
                    if client and event["stage"] == "ResponseComplete" and call not in _OF_THE_BENCHMARK:
                        counted.setdefault(client, Counter())[call] += 1
        return {client: dict(counts.most_common()) for client, counts in counted.items()}

    def lines(self) -> int:
        """Number of all requests that are in the log."""
        return sum(_lines(path) for path in self._files())

    def _files(self) -> list[Path]:
        return sorted(self._log.parent.glob(f"{self._log.stem}*{self._log.suffix}"))


def _client(event: Mapping[str, Any]) -> str:
    """Who has made a request: `operator`, `kuberay`, or somebody else (empty)."""
    if event["user"].get("username") == "kuberay-operator":
        return "kuberay"
    return "operator" if event.get("userAgent", "").startswith(_OPERATOR) else ""


def _lines(path: Path) -> int:
    with path.open("rb") as content:
        return sum(block.count(b"\n") for block in iter(lambda: content.read(1 << 20), b""))
