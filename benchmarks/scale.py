"""Measures the operator with thousands of jobs and hundreds of services, and KubeRay alone with as many of its own.

The API server is a real one, without nodes, and so is KubeRay's operator. First RayJobs and RayServices are created at
once, then, on a new control plane on the same machine, FinetuneJobs and ModelServices. Measured are the time from
creating an object until its RayCluster exists, CPU time and memory of the processes, and the requests of both operators
to the API server, also when nothing changes. All of it shares the machine's cores with everything else that runs there,
so compare only within one run.

    python -m benchmarks.scale --jobs 5000 --services 500 --output benchmarks/results/scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import kopf

from benchmarks.scale_costs import Audit, control_plane, usage
from benchmarks.scale_objects import FINETUNE_JOB, MODEL_SERVICE, RAY_JOB, RAY_SERVICE, Kind
from spotune_operator.kube.client import RAY_CLUSTERS, Kube, Manifest
from spotune_testcluster.cluster import Cluster

CREATED_AT_ONCE: Final = 16
PORT: Final = 18080
SETTLE_SECONDS: Final = 20.0
QUIET_REQUESTS_PER_SECOND: Final = 5.0
LONGEST_SECONDS: Final = 3600.0
_NAMESPACE: Final = "scale"
_NAME: Final = re.compile(r"(rayjob|rayservice|job|service)-\d{4}")


class Arrivals:
    """Creates objects as fast as the API server accepts them, and notes when each has its RayCluster.

    Args:
        kube: the API server.
        kinds: how many of each kind.
    """

    def __init__(self, kube: Kube, kinds: dict[Kind, int]) -> None:
        self._kube = kube
        self._kinds = kinds
        self._created: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._complete = asyncio.Event()

    async def run(self) -> dict[str, Any]:
        """Create all objects, services among jobs; returns the seconds until their RayClusters exist, by kind."""
        watch = asyncio.create_task(self._watch(await self._list_version()))
        limit = asyncio.Semaphore(CREATED_AT_ONCE)
        start = time.monotonic()
        await asyncio.gather(*(self._create(kind, number, limit) for kind, number in self._order()))
        creating = time.monotonic() - start
        async with asyncio.timeout(LONGEST_SECONDS):
            await self._complete.wait()
        watch.cancel()
        return {
            "creatingSeconds": round(creating, 1),
            "allSeconds": round(max(self._seen.values()) - start, 1),
            **{kind.resource.plural: self._latencies(kind) for kind in self._kinds},
        }

    def _order(self) -> Iterator[tuple[Kind, int]]:
        """Each kind evenly spread over the whole time."""
        places = [
            ((number + 0.5) / count, number, kind) for kind, count in self._kinds.items() for number in range(count)
        ]
        return ((kind, number) for _, number, kind in sorted(places, key=lambda place: place[:2]))

    def _latencies(self, kind: Kind) -> dict[str, Any]:
        names = [name for name in self._created if name.startswith(kind.prefix)]
        seconds = sorted(self._seen[name] - self._created[name] for name in names)

        def percentile(share: float) -> float:
            return round(seconds[int(share * (len(seconds) - 1))], 2)

        return {
            "number": len(seconds),
            "p50Seconds": round(statistics.median(seconds), 2),
            "p95Seconds": percentile(0.95),
            "p99Seconds": percentile(0.99),
        }

    async def _create(self, kind: Kind, number: int, limit: asyncio.Semaphore) -> None:
        async with limit:
            manifest = kind.manifest(number, _NAMESPACE)
            self._created[manifest["metadata"]["name"]] = time.monotonic()
            await self._kube.create(kind.resource, manifest)

    async def _list_version(self) -> str:
        versions = [each async for _, each in self._kube.pages(RAY_CLUSTERS, _NAMESPACE, "")]
        return versions[-1]

    async def _watch(self, since: str) -> None:
        """Record when the RayCluster of each object exists, whatever its name."""
        number = sum(self._kinds.values())
        async for kind, item in self._kube.watch(RAY_CLUSTERS, _NAMESPACE, "", since, int(LONGEST_SECONDS)):
            name = _owner(item) if kind == "ADDED" else None
            if name is not None:
                self._seen.setdefault(name, time.monotonic())
            if len(self._seen) == number:
                self._complete.set()
                return


def _owner(cluster: Manifest) -> str | None:
    """Name of the object of this benchmark that a RayCluster belongs to."""
    owners = cluster["metadata"].get("ownerReferences") or [{"name": ""}]
    found = _NAME.search(owners[0]["name"])
    return found[0] if found else None


@contextmanager
def running_operator(cluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    """The operator as a process on this machine."""
    environment = {
        **os.environ,
        "KUBECONFIG": str(cluster.kubectl.kubeconfig),
        "SPOTUNE_OPERATOR_PORT": str(PORT),
        "SPOTUNE_OPERATOR_HOST": "127.0.0.1",
        "SPOTUNE_OPERATOR_SERVING": "true",
    }
    command = [str(Path(sys.executable).with_name("spotune")), "operator"]
    log = Path("build/scale-operator.log")
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stderr=output) as process:
        try:
            _wait(lambda: _answers("readyz"), 120)
            yield process
        finally:
            process.terminate()


def _answers(page: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/{page}", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wait(until: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not until():
        if time.monotonic() > end:
            raise TimeoutError(f"timed out after {seconds:.0f} s")
        time.sleep(0.5)


def _wait_until_quiet(audit: Audit) -> None:
    """Wait until the API server is idle, so that earlier requests are not counted."""

    def requests_per_second() -> float:
        before = audit.lines()
        time.sleep(5)
        return (audit.lines() - before) / 5

    _wait(lambda: requests_per_second() < QUIET_REQUESTS_PER_SECOND, LONGEST_SECONDS)


@contextmanager
def new_cluster() -> Iterator[Cluster]:
    """A control plane with KubeRay and the definitions of the operator, without nodes."""
    cluster = Cluster("scale")
    cluster.down()
    cluster.up((), report=lambda line: print(line, flush=True))
    try:
        os.environ["KUBECONFIG"] = str(cluster.kubectl.kubeconfig)
        cluster.kubectl("apply", "--server-side", "--filename=manifests/crd.yaml")
        cluster.kubectl("create", "namespace", _NAMESPACE)
        yield cluster
    finally:
        cluster.down()


def _client() -> Kube:
    def login() -> kopf.ConnectionInfo:
        found = kopf.login_with_kubeconfig(settings=kopf.OperatorSettings())
        assert found is not None, "KUBECONFIG was just set"
        return found

    return Kube(login)


async def measure_kuberay(jobs: int, services: int) -> dict[str, Any]:
    """KubeRay alone: RayJobs and RayServices."""
    with new_cluster() as cluster:
        async with _client() as kube:
            audit, before = Audit(cluster.files.audit_log), control_plane(cluster)
            found = await Arrivals(kube, _kinds({RAY_JOB: jobs, RAY_SERVICE: services})).run()
            return {**found, "cpuSeconds": _used(before, control_plane(cluster)), "calls": audit.calls()}


async def measure_operator(jobs: int, services: int, idle_seconds: float) -> dict[str, Any]:
    """The operator: FinetuneJobs and ModelServices."""
    with new_cluster() as cluster, running_operator(cluster) as operator:
        async with _client() as kube:
            at_start = usage(operator.pid)
            audit, before = Audit(cluster.files.audit_log), control_plane(cluster)
            found = await Arrivals(kube, _kinds({FINETUNE_JOB: jobs, MODEL_SERVICE: services})).run()
            used = _used(before, control_plane(cluster))
            cpu = usage(operator.pid)["cpuSeconds"] - at_start["cpuSeconds"]
        calls = audit.calls()
        await asyncio.to_thread(_wait_until_quiet, audit)
        await asyncio.sleep(SETTLE_SECONDS)
        settled = usage(operator.pid)
        audit = Audit(cluster.files.audit_log)
        await asyncio.sleep(idle_seconds)
        idle = usage(operator.pid)
        return {
            **found,
            "cpuSeconds": {"operator": round(cpu, 2), **used},
            "calls": calls,
            "operator": {"atStart": at_start, "withObjects": settled},
            "idle": {
                "seconds": idle_seconds,
                "calls": audit.calls().get("operator", {}),
                "cpuSeconds": round(idle["cpuSeconds"] - settled["cpuSeconds"], 2),
                "residentMiB": idle["residentMiB"],
            },
        }


def _kinds(numbers: dict[Kind, int]) -> dict[Kind, int]:
    return {kind: number for kind, number in numbers.items() if number > 0}


def _used(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: round(after[name] - before.get(name, 0.0), 1) for name in sorted(after)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both on a control plane of their own, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--services", type=int, default=100)
    parser.add_argument("--idle-seconds", type=float, default=180)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    kuberay = asyncio.run(measure_kuberay(options.jobs, options.services))
    print(kuberay, flush=True)
    operator = asyncio.run(measure_operator(options.jobs, options.services, options.idle_seconds))
    machine = f"{os.cpu_count()} cores, {platform.machine()}, shared with others"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    report = {"machine": machine, "commit": commit, "kopf": version("kopf"), "kubeRay": kuberay, "spotune": operator}
    text = json.dumps(report, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
