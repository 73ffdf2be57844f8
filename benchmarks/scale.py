"""Measures the operator with a thousand FinetuneJobs, and KubeRay alone with as many RayJobs.

The API server is a real one, without nodes. Measured are the time from creating a job until its RayCluster exists, the
operator's memory and CPU time, and its requests to the API server when nothing changes. The RayJobs are created first,
and deleted before the FinetuneJobs are created. KubeRay's operator and the control plane share the machine's cores with
everything else, so compare only within one run.

    python benchmarks/scale.py --output benchmarks/results/scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kopf

from spotune_operator.kube.client import JOBS, RAY_CLUSTERS, Kube, Manifest, Resource
from spotune_testcluster.cluster import Cluster

RAY_JOBS = Resource("ray.io/v1", "RayJob", "rayjobs")
CREATED_AT_ONCE = 16
PORT = 18080
SETTLE_SECONDS = 20.0
QUIET_REQUESTS_PER_SECOND = 5.0


def finetune_job(name: str, namespace: str) -> Manifest:
    """A small job; without nodes it waits for its head forever."""
    return {
        "apiVersion": JOBS.group_version,
        "kind": JOBS.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"source": "/data/model"},
            "dataset": {"train": {"source": "/data/shards"}},
            "training": {"epochs": 1, "globalBatchSize": 8},
            "workers": {"count": 2},
            "storage": {"storageClassName": "shared", "size": "1Gi"},
            "cluster": {"provider": "none"},
        },
    }


def ray_job(name: str, namespace: str) -> Manifest:
    """A RayJob whose cluster has a head and a group of two workers."""
    resources = {"requests": {"cpu": "1", "memory": "1Gi"}}
    container = {"image": "testcluster.local/trainer:1", "resources": resources}
    return {
        "apiVersion": RAY_JOBS.group_version,
        "kind": RAY_JOBS.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "entrypoint": "python -c 'print(1)'",
            "rayClusterSpec": {
                "rayVersion": "2.60.0",
                "headGroupSpec": {
                    "rayStartParams": {},
                    "template": {"spec": {"containers": [container | {"name": "ray-head"}]}},
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": 0,
                        "minReplicas": 0,
                        "maxReplicas": 2,
                        "rayStartParams": {},
                        "template": {"spec": {"containers": [container | {"name": "ray-worker"}]}},
                    }
                ],
            },
        },
    }


async def apply_to_cluster(
    kube: Kube, resource: Resource, make: Callable[[str, str], Manifest], namespace: str, number: int
) -> dict[str, Any]:
    """Create jobs as fast as the API server accepts them; returns the seconds until each has its RayCluster."""
    created: dict[str, float] = {}
    seen: dict[str, float] = {}
    complete = asyncio.Event()
    _, first = await _listed(kube, namespace)
    watch = asyncio.create_task(_watch(kube, namespace, first, number, seen, complete))
    limit = asyncio.Semaphore(CREATED_AT_ONCE)

    async def create(index: int) -> None:
        async with limit:
            name = f"scale-{index:04d}"
            created[name] = time.monotonic()
            await kube.create(resource, make(name, namespace))

    start = time.monotonic()
    await asyncio.gather(*(create(index) for index in range(number)))
    creating = time.monotonic() - start
    await complete.wait()
    watch.cancel()
    seconds = sorted(seen[name] - created[name] for name in created)
    return {
        "jobs": number,
        "creatingSeconds": round(creating, 1),
        "allSeconds": round(max(seen.values()) - start, 1),
        "p50Seconds": round(statistics.median(seconds), 2),
        "p99Seconds": round(seconds[int(0.99 * (len(seconds) - 1))], 2),
    }


async def _listed(kube: Kube, namespace: str) -> tuple[int, str]:
    count, list_version = 0, ""
    async for items, page_version in kube.pages(RAY_CLUSTERS, namespace, ""):
        count, list_version = count + len(items), page_version
    return count, list_version


async def _watch(
    kube: Kube, namespace: str, since: str, number: int, seen: dict[str, float], complete: asyncio.Event
) -> None:
    """Record when the RayCluster of each job exists, whatever its name."""
    async for kind, item in kube.watch(RAY_CLUSTERS, namespace, "", since, 3000):
        owners = item["metadata"].get("ownerReferences") or []
        if kind == "ADDED" and owners:
            seen.setdefault(owners[0]["name"], time.monotonic())
        if len(seen) == number:
            complete.set()
            return


@contextmanager
def running_operator(cluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    """The operator as a process on this machine."""
    environment = {
        **os.environ,
        "KUBECONFIG": str(cluster.kubectl.kubeconfig),
        "SPOTUNE_OPERATOR_PORT": str(PORT),
        "SPOTUNE_OPERATOR_HOST": "127.0.0.1",
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


def cost(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Memory and CPU time that a process has used so far."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(times[11]) + int(times[12])
    return {
        "residentMiB": round(int(fields["VmRSS"].split()[0]) / 1024, 1),
        "peakMiB": round(int(fields["VmHWM"].split()[0]) / 1024, 1),
        "cpuSeconds": round(ticks / os.sysconf("SC_CLK_TCK"), 2),
    }


class Audit:
    """The operator's requests to the API server, from the server's audit log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = log.stat().st_size

    def calls(self) -> dict[str, int]:
        """Requests of the operator since this object was created, by verb and kind; a watch counts when it starts."""
        counted: Counter[str] = Counter()
        with self._log.open() as lines:
            lines.seek(self._offset)
            for line in lines:
                event = json.loads(line)
                agent = event.get("userAgent", "")
                if agent.startswith(("spotune-operator", "kopf")) and event["stage"] == "ResponseComplete":
                    counted[f"{event['verb']} {event.get('objectRef', {}).get('resource', event['requestURI'])}"] += 1
        return dict(counted)


def _wait_until_quiet(log: Path) -> None:
    """Wait until the API server is idle, so that earlier requests are not counted."""

    def requests_per_second() -> float:
        before = _lines(log)
        time.sleep(5)
        return (_lines(log) - before) / 5

    _wait(lambda: requests_per_second() < QUIET_REQUESTS_PER_SECOND, 900)


def _lines(log: Path) -> int:
    with log.open("rb") as content:
        return sum(block.count(b"\n") for block in iter(lambda: content.read(1 << 20), b""))


async def measure(cluster: Cluster, number: int, idle_seconds: float) -> dict[str, Any]:
    """Run all measurements, one after the other."""
    os.environ["KUBECONFIG"] = str(cluster.kubectl.kubeconfig)

    def login() -> kopf.ConnectionInfo:
        found = kopf.login_with_kubeconfig(settings=kopf.OperatorSettings())
        assert found is not None, "KUBECONFIG was just set"
        return found

    kubectl = cluster.kubectl
    kubectl("apply", "--server-side", "--filename=manifests/crd.yaml")
    for namespace in ("scale-rayjobs", "scale-finetunejobs"):
        kubectl("create", "namespace", namespace)
    results: dict[str, Any] = {}
    async with Kube(login) as kube:
        results["rayJobs"] = await apply_to_cluster(kube, RAY_JOBS, ray_job, "scale-rayjobs", number)
        kubectl("delete", "namespace", "scale-rayjobs", "--timeout=900s", timeout=920)
        await asyncio.to_thread(_wait_until_quiet, cluster.files.audit_log)
        with running_operator(cluster) as operator:
            before = cost(operator)
            audit = Audit(cluster.files.audit_log)
            results["finetuneJobs"] = await apply_to_cluster(kube, JOBS, finetune_job, "scale-finetunejobs", number)
            await asyncio.to_thread(_wait_until_quiet, cluster.files.audit_log)
            await asyncio.sleep(SETTLE_SECONDS)
            after = cost(operator)
            results["operator"] = {
                "atStart": before,
                "withJobs": after,
                "cpuMillisecondsPerJob": round(1000 * (after["cpuSeconds"] - before["cpuSeconds"]) / number, 1),
                "calls": audit.calls(),
            }
            audit = Audit(cluster.files.audit_log)
            await asyncio.sleep(idle_seconds)
            idle = cost(operator)
            results["idle"] = {
                "seconds": idle_seconds,
                "calls": audit.calls(),
                "cpuSeconds": round(idle["cpuSeconds"] - after["cpuSeconds"], 2),
                "residentMiB": idle["residentMiB"],
            }
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Start a cluster without nodes, measure, and delete it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--idle-seconds", type=float, default=180)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    cluster = Cluster("scale")
    cluster.down()
    cluster.up((), report=lambda line: print(line, flush=True))
    try:
        results = asyncio.run(measure(cluster, options.jobs, options.idle_seconds))
    finally:
        cluster.down()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, shared with others"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    report = {"machine": machine, "commit": commit, "kopf": version("kopf"), **results}
    text = json.dumps(report, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
