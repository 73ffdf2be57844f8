"""Measures what a job with many workers costs its driver: one of 10, of 100 and of 1,000 workers, one node each.

Driver, agent pool, node check, status and ledger are the real ones, and so are Ray's calls to the nodes. The nodes live
in one Ray actor, and their workers only speak the protocol (`many_workers_nodes.py`), since 1,000 processes that import
PyTorch do not fit on one machine. Ray itself has one node here: its own work for 1,000 nodes is not measured.

    python -m benchmarks.many_workers --output benchmarks/results/many_workers.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from benchmarks.machine import describe_machine
from benchmarks.many_workers_nodes import Pace, SimulatedNodes
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.driver.driver import Driver, DriverDependencies
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.worker_group.agent_pool import AgentPool
from spotune_trainer.worker_group.result import GroupResult
from tests.trainer.support.connected_ray import connected_ray
from tests.trainer.support.measured import publish
from tests.trainer.support.runs import Runs

WORKERS = (10, 100, 1000)
PACE = Pace(steps=300, step_seconds=0.2, commit_every=50)
SETTLED_STEPS = 30
"""The first steps are not measured, and neither are the last ones."""
_SAMPLE_SECONDS = 0.1


class Pool(AgentPool):
    """The agents of nodes of one slot each, all of them in one actor."""

    def __init__(self, directory: Path, workers: int, actor: Any) -> None:
        nodes = [{"NodeID": f"{number:056x}", "Alive": True, "Resources": {"CPU": 1.0}} for number in range(workers)]
        super().__init__(directory, nodes=lambda: nodes, draining=dict)
        self._actor = actor
        self.group_seconds = {"start": 0.0, "result": 0.0}

    def run_group(self, task: WorkerTask, world_size: int) -> GroupResult:
        """Also measures how long the driver takes to start the ranks and, at the end, to collect their results."""
        result = super().run_group(task, world_size)
        ended = files.read_json(task.logs.progress) or {}
        self.group_seconds["result"] = round(time.time() - ended["time"], 3)
        return result

    def _start_ranks(self, task: WorkerTask, world_size: int) -> dict[Any, Any]:
        started = time.monotonic()
        calls = super()._start_ranks(task, world_size)
        self.group_seconds["start"] = round(time.monotonic() - started, 3)
        return calls

    def _start_actor(self, node: str, slots: int, gpus: bool) -> Any:
        return _Handle(self._actor, int(node, 16))


class _Handle:
    """The actor of one node, as `AgentPool` uses it."""

    def __init__(self, actor: Any, number: int) -> None:
        self.call, self.block_forever, self.exit_agent = (
            _Method(method, number) for method in (actor.call, actor.block_forever, actor.exit_agent)
        )


@dataclass(frozen=True)
class _Method:
    """A method of the actor, for one node."""

    method: Any
    number: int

    def remote(self, *args: Any, **options: Any) -> Any:
        """Call it; returns a reference to the result."""
        return self.method.remote(self.number, *args, **options)


@dataclass(frozen=True)
class Sample:
    """What the driver has used up to a step.

    Attributes:
        step: the number of steps that its status shows.
        cpu_seconds: of its process, without the thread that takes samples.
        status_bytes: of `status.json` now.
        ledger_bytes: of the ledger.
    """

    step: int
    cpu_seconds: float
    status_bytes: int
    ledger_bytes: int


class Sampler:
    """Takes samples in a thread of the driver's process."""

    def __init__(self, directory: JobDirectory) -> None:
        self._directory = directory
        self.samples: list[Sample] = []
        threading.Thread(target=self._run, name="sampler", daemon=True).start()

    def between(self, first: int, last: int) -> tuple[Sample, Sample, int]:
        """The first sample from a step on, the last one up to another step, and the most bytes of a status."""
        found = [sample for sample in self.samples if first <= sample.step <= last]
        return found[0], found[-1], max(sample.status_bytes for sample in found)

    def _run(self) -> None:
        while True:
            time.sleep(_SAMPLE_SECONDS)
            status = files.read_json(self._directory.status) or {}
            if status.get("phase") == "Training" and self._directory.ledger.exists():
                cpu = time.process_time() - time.thread_time()
                sizes = self._directory.status.stat().st_size, self._directory.ledger.stat().st_size
                self.samples.append(Sample(status["step"], cpu, *sizes))


def job_of_size(runs: Runs, workers: int) -> FinetuneJob:
    """A job that starts with all of its workers, and checks their nodes."""
    return runs.job(
        training={"globalBatchSize": workers},
        execution={"microBatchSize": 1, "zeroStage": 2},
        workers={"count": workers, "min": workers, "gpus": 0, "nodeCheck": "always"},
    )


def measure(workers: int, root: Path) -> dict[str, Any]:
    """The costs of a job with this number of workers."""
    runs = Runs(root)
    directory, job = runs.empty("many"), job_of_size(runs, workers)
    files.write_json(directory.job, job.model_dump(mode="json"))
    with connected_ray(root / "ray", 2):
        actor = ray.remote(SimulatedNodes).options(num_cpus=0, max_concurrency=10 * workers + 100).remote(PACE)
        pool = Pool(directory.root, workers, actor)
        sampler = Sampler(directory)
        driver = Driver(directory, job, 1, DriverDependencies(pool))
        started, cpu = time.time(), time.process_time()
        driver.run()
        total_cpu = time.process_time() - cpu
    first, last, status_bytes = sampler.between(SETTLED_STEPS, PACE.steps - SETTLED_STEPS)
    steps, ledger = last.step - first.step, Ledger(directory)
    (group,), (ended,) = ledger.records("generation-started"), ledger.records("generation-ended")
    commits = [record["seconds"] for record in ledger.records("committed")]
    status = files.read_json(directory.status) or {}
    return {
        "workers": workers,
        "perStep": {
            "driverCpuMilliseconds": round(1000 * (last.cpu_seconds - first.cpu_seconds) / steps, 2),
            "ledgerBytes": round((last.ledger_bytes - first.ledger_bytes) / steps, 1),
        },
        "statusBytes": status_bytes,
        "seconds": {
            "nodesReady": round(group["time"] - group["planSeconds"] - started, 2),
            "ranksStarted": pool.group_seconds["start"],
            "groupFormed": status["startup"]["workers"],
            "resultsCollected": pool.group_seconds["result"],
            "commit": commits,
        },
        "driverCpuSeconds": round(total_cpu, 2),
        "generationSeconds": ended["seconds"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of workers in a process of its own, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--one", action="store_true", help="measure in this process, and print one line of JSON")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args(arguments)
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(json.dumps(measure(options.workers[0], Path(folder))) + "\n")
        return
    jobs = []
    for workers in options.workers:
        command = [sys.executable, "-m", "benchmarks.many_workers", "--one", "--workers", str(workers)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        jobs.append(json.loads(output.splitlines()[-1]))
        sys.stderr.write(f"{json.dumps(jobs[-1])}\n")
    pace = {"steps": PACE.steps, "stepSeconds": PACE.step_seconds, "commitEverySteps": PACE.commit_every}
    publish({"machine": describe_machine("ray"), "pace": pace, "jobs": jobs}, options.output)


if __name__ == "__main__":
    main()
