"""Measures the cost of a lost head and a lost worker on a real cluster, and its parts.

Starts a Kubernetes cluster with KubeRay (tests/cluster) and the operator, and trains a tiny model on two CPU workers
that commit after every step. Then deletes the head pod, deletes a worker pod without grace period, and kills a worker's
process, one after the other. Each recovery is split into

    detect      until it is first recorded: as the new pod's object, or as a failure in the ledger
    schedule    until the replacement pod has a node; 0 if only a process is replaced
    start       until the new worker group: containers, Ray, supervisor and driver, a plan
    load        until the group's first step: processes, data, model, engine, checkpoint
    firstStep   until the first step that was not trained before

and compared with the first start of the same job: `start` from the object of the first pod to the first worker group,
`load` and `firstStep` as above.

Run it by hand, on a machine without other load:

    python -m benchmarks.recovery --output benchmarks/results/recovery.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from spotune_testcluster.cluster import Cluster
from spotune_testcluster.pytest_plugin import NODES, ClusterUnderTest, Fault
from spotune_testcluster.waiting import wait_for
from tests.cluster.faults import pods, processes
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.faults.timeline import recovery, training_intervals
from tests.cluster.finetune_jobs import RunningJob, workplace
from tests.cluster.operator_install import installed
from tests.provenance import commit

STEPS = 100_000
"""More steps than are ever trained: the job is deleted when the benchmark is done."""
PARTS = ("detect", "schedule", "start", "load", "firstStep")
FIRST_START = "firstStart"


def worker_pod_deleted_by_force(harness: FaultHarness) -> None:
    """Force-delete a worker pod, so that it disappears without notice, as if its node were lost."""
    with harness.expect_recovery("workerLost", "preempted", lost_workers=1):  # even so, the kubelet notifies Ray
        harness.delete(harness.job.pods("workers")[:1], "--force", "--grace-period=0")


LOSSES: Mapping[str, tuple[str, Callable[[FaultHarness], None]]] = {
    "headPodDeleted": ("head", pods.head_pod_deleted),
    "workerPodDeletedByForce": ("workers", worker_pod_deleted_by_force),
    "workerProcessKilled": ("", processes.worker_process_killed),
}
"""The losses, each with the component whose pod is replaced; empty if no pod is."""


def measure(cluster: ClusterUnderTest, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of each part, for each loss and round, and for the first start."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (FIRST_START, *LOSSES)}
    with installed(cluster) as operator, workplace(cluster) as place, tempfile.TemporaryDirectory() as folder:
        manifest = place.manifest("recovery", training={"maxSteps": STEPS}, checkpoint={"every": 1})
        with place.running(manifest) as job:
            harness = FaultHarness(cluster, Fault(cluster), operator, job)
            job.wait_for_commit()
            found[FIRST_START].append(first_start(job, Path(folder)))
            print(FIRST_START, found[FIRST_START][-1], flush=True)
            for _ in range(rounds):
                for name, (component, inject) in LOSSES.items():
                    inject(harness)
                    found[name].append(split(job, component, harness.injected_faults[-1].time, Path(folder)))
                    print(name, found[name][-1], flush=True)
    return found


def split(job: RunningJob, component: str, injected_at: float, folder: Path) -> dict[str, float]:
    """Seconds of each part of one recovery; 0 for a part that finished before the previous one."""
    created = scheduled = injected_at
    if component:
        created, scheduled = wait_for(
            "the pod in its place", 60, lambda: _newest(job, component, injected_at), every=0.5
        )
    seen = recovery(job.artifacts(folder), injected_at)
    assert seen is not None, "no worker group was started"
    moments = [injected_at]
    detected = min(created, seen.detected) if component else seen.detected
    for moment in (detected, scheduled, seen.started, seen.first_begin, seen.new_step):
        moments.append(max(moment, moments[-1]))
    return {**_parts(moments), "all": round(seen.seconds_to_new_step, 2)}


def first_start(job: RunningJob, folder: Path) -> dict[str, float]:
    """Seconds of each part of the start of the job, from the object of its first pod."""
    every_pod = [*job.pods("head"), *job.pods("workers")]
    created = min(_time(pod["metadata"]["creationTimestamp"]) for pod in every_pod)
    artifacts = job.artifacts(folder)
    started = artifacts.ledger.records("generation-started")[0]["time"]
    first = training_intervals(artifacts)[0]
    done = min(first.steps.values())
    return {**_parts([created, created, created, started, first.begin, done]), "all": round(done - created, 2)}


def _parts(moments: Sequence[float]) -> dict[str, float]:
    """Seconds of each part, from the times at which the parts start and end."""
    return {part: round(after - before, 2) for part, (before, after) in zip(PARTS, pairwise(moments), strict=True)}


def _newest(job: RunningJob, component: str, injected_at: float) -> tuple[float, float] | None:
    """Creation and scheduling time of the newest pod, in whole seconds, if it was created after the loss."""
    made = {_time(pod["metadata"]["creationTimestamp"]): pod for pod in job.pods(component)}
    newest = max(made, default=0.0)
    if newest < injected_at - 1:
        return None
    scheduled = [found for found in made[newest]["status"]["conditions"] if found["type"] == "PodScheduled"]
    return newest, _time(scheduled[0]["lastTransitionTime"])


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians of each part over all rounds."""
    return {part: round(statistics.median(one[part] for one in rounds), 2) for part in (*PARTS, "all")}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="number of losses of each kind")
    parser.add_argument("--name", default="recovery", help="name of the test cluster")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    machine = Cluster(options.name)
    machine.down()
    load = os.getloadavg()[0]
    try:
        machine.up(NODES, report=print)
        names = [node.name for node in NODES]
        found = measure(
            ClusterUnderTest(machine.kubectl, machine, "testcluster.local/trainer:1", "shared", names), options.rounds
        )
    finally:
        machine.down()
    about: dict[str, Any] = {
        "commit": commit(),
        "cores": os.cpu_count(),
        "loadBefore": round(load, 2),
        "processor": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        **{name: version(name) for name in ("ray", "torch", "deepspeed", "transformers")},
    }
    summary = {name: {"median": medians(rounds), "rounds": rounds} for name, rounds in found.items()}
    result = json.dumps({"machine": about, "seconds": summary}, indent=2)
    print(result)
    if options.output:
        options.output.write_text(result + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
