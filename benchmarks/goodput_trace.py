"""Compares the goodput that `spotune simulate` predicts with a real run whose nodes come and go by the same trace.

Trains a small T5 on a private Ray whose head has no slots for workers. Every node of the trace is a raylet with one
slot. A raylet is started when the trace gains a node, and killed with all of its processes when the trace loses one.
`--compress` divides the times of the trace, and `--nodes-each` its number of nodes. The simulation gets the durations
of start-up, steps and commits from the run's ledger, and the times at which nodes were really available: the start of a
raylet counts as part of the trace, like the boot of a machine.

    python benchmarks/goodput_trace.py --seconds 7200 --compress 8 --output benchmarks/results/goodput_trace.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from spotune.job import FinetuneJob
from spotune.simulate.measured import read_timings
from spotune.simulate.simulation import simulate
from spotune.simulate.terms import Scenario, Timings
from spotune.simulate.trace import Trace, read_trace
from spotune_trainer import files
from spotune_trainer.job_directory.job import job_of, put_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.lock import locked
from spotune_trainer.observability.goodput import TIMELINE_EVENTS
from spotune_trainer.supervisor.console import PlainView
from spotune_trainer.supervisor.http_server import ProgressServer
from spotune_trainer.supervisor.ray_head.local import LocalRay, RunningRay
from spotune_trainer.supervisor.ray_head.processes import ProcessFamily, boot_id, find_process
from spotune_trainer.supervisor.supervisor import Supervisor
from tests.trainer.support.runs import Runs

WORKERS = 2
COMMIT_EVERY_SECONDS = 10.0
RESIZE_COOLDOWN_SECONDS = 30.0
START_SECONDS = 180.0
NODE_MARK = "SPOTUNE_BENCHMARK_NODE"
JOIN = """
from ray._private import ray_constants, services
services.get_node_ip_address = lambda address=None: "127.0.0.1"
ray_constants.ENABLE_RAY_CLUSTER = True
from ray.scripts.scripts import main
main()
"""
"""`ray start` for a head on 127.0.0.1 only. Ray's own switch for that does not allow other nodes."""


@dataclass
class Nodes:
    """The raylets of a Ray cluster: one slot each, and a head without slots.

    Attributes:
        ray: the head.
        changes: (Unix time, nodes) of every change that really happened.
    """

    ray: RunningRay
    changes: list[tuple[float, int]] = field(default_factory=list)
    _living: list[ProcessFamily] = field(default_factory=list)
    _started: int = 0

    def scale_to(self, count: int) -> None:
        """Start or kill raylets until there are this many."""
        while len(self._living) > count:
            self._living.pop().kill()
            self.changes.append((time.time(), len(self._living)))
        while len(self._living) < count:
            self._living.append(self._start())
            self.changes.append((time.time(), len(self._living)))

    def _start(self) -> ProcessFamily:
        """Start a raylet with the environment of the head, so with its token and temporary folder."""
        self._started += 1
        mark = f"{NODE_MARK}={self.ray.temporary.name}-{self._started}"
        entries = Path(f"/proc/{self.ray.parts['raylet'].pid}/environ").read_text(errors="replace").split("\0")
        environment = dict(entry.split("=", 1) for entry in [*entries, mark] if "=" in entry)
        command = [
            *(sys.executable, "-c", JOIN, "start", "--address", self.ray.address),
            *("--node-ip-address", "127.0.0.1", "--num-cpus", "1"),
            *("--object-store-memory", str(80 * 1024 * 1024), "--dashboard-agent-listen-port", "0"),
            *("--min-worker-port", "0", "--max-worker-port", "0", "--disable-usage-stats"),
        ]
        starter = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        family = ProcessFamily(find_process(starter.pid), boot_id(), mark)
        output, _ = starter.communicate(timeout=START_SECONDS)
        if starter.returncode != 0:
            raise RuntimeError(f"a node could not be started: {output}")
        return family


def supervise(root: Path) -> None:
    """Like `spotune run`, but the head has no slots for workers."""
    directory = JobDirectory(root)
    job = job_of(directory)
    assert job is not None, "it was put there before"
    supervisor = Supervisor(directory, lambda: job.spec.retry, LocalRay(root, 0, gpus=False), PlainView(print))
    with locked(directory), ProgressServer(directory, supervisor.health_problem) as server:
        supervisor.run(server.url)


def measure(root: Path, trace: Trace) -> dict[str, Any]:
    """The goodput of a real run on a trace, and the simulated goodput with the nodes that it really had."""
    runs = Runs(root)
    job: FinetuneJob = runs.job(
        training={"epochs": 1_000_000},
        checkpoint={"every": f"{COMMIT_EVERY_SECONDS:g}s"},
        execution={"zeroStage": 1, "microBatchSize": 3},
        workers={"count": WORKERS, "min": 1, "gpus": 0, "resizeCooldown": f"{RESIZE_COOLDOWN_SECONDS:g}s"},
    )
    directory = runs.empty("goodput")
    put_job(directory, job)
    command = [sys.executable, __file__, "--supervise", str(directory.root)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with (root / "supervisor.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    ray: RunningRay | None = None
    try:
        ray = _wait_for_ray(directory, process)
        nodes = Nodes(ray)
        began = _wait_for_attempt(directory)
        nodes.changes.append((began, 0))
        for seconds, count in trace.changes:
            _wait_until(began + seconds, process)
            nodes.scale_to(count)
        _wait_until(began + trace.seconds, process)
        status = files.read_json(directory.status) or {}
    finally:
        process.kill()
        process.wait()
        if ray is not None:
            ray.shut_down()
    return _compare(directory, status, nodes.changes, began)


def _compare(
    directory: JobDirectory, status: dict[str, Any], changes: list[tuple[float, int]], began: float
) -> dict[str, Any]:
    seconds = status["time"] - began
    times = read_timings(directory.root, Timings(step={}))
    points = {max(0.0, round(at - began, 3)): count for at, count in changes}
    happened = Trace(tuple(sorted(points.items())), seconds)
    scenario = Scenario(
        workers=WORKERS, min_workers=1, checkpoint_every=COMMIT_EVERY_SECONDS, resize_cooldown=RESIZE_COOLDOWN_SECONDS
    )
    predicted = simulate(happened, scenario, times)
    return {
        "seconds": round(seconds, 1),
        "nodes": happened.changes,
        "restarts": status["restarts"],
        "steps": status["step"],
        "stepsLost": status["stepsLost"],
        "predictedSteps": predicted.steps,
        "predictedStepsLost": predicted.steps_lost,
        "times": vars(times),
        "events": [_event(record, began) for record in Ledger(directory).records(*TIMELINE_EVENTS)],
        "parts": {
            part: {"measured": value, "predicted": round(predicted.spent[part], 3)}
            for part, value in status["goodputParts"].items()
        },
        "goodput": status["goodput"],
        "predictedGoodput": round(predicted.goodput, 4),
        "points": round(100 * (predicted.goodput - status["goodput"]), 2),
    }


def _event(record: dict[str, Any], began: float) -> dict[str, Any]:
    """An event of the ledger, with the seconds since the start of the run."""
    at = round(record["time"] - began, 2)
    return {"at": at, **{name: value for name, value in record.items() if name not in ("time", "message")}}


def _wait_for_ray(directory: JobDirectory, process: subprocess.Popen[bytes]) -> RunningRay:
    """The head, once the supervisor has published its address."""
    until = time.time() + START_SECONDS
    while (record := (files.read_json(directory.supervisor) or {}).get("ray")) is None:
        _wait_until(time.time() + 0.1, process)
        if time.time() > until:
            raise TimeoutError("Ray did not start")
    return RunningRay.from_json(record)


def _wait_for_attempt(directory: JobDirectory) -> float:
    """The start time of the first attempt, from which wall-clock time counts."""
    while not (started := Ledger(directory).records("attempt-started")):
        time.sleep(0.05)
    return float(started[0]["time"])


def _wait_until(moment: float, process: subprocess.Popen[bytes]) -> None:
    while time.time() < moment:
        if process.poll() is not None:
            raise RuntimeError(f"the run exited with code {process.returncode}")
        time.sleep(min(0.2, max(0.0, moment - time.time())))


def select_part(trace: Trace, begin: float, seconds: float, compress: float, nodes_each: int) -> Trace:
    """A part of a trace, compressed, with at most as many nodes as the job uses."""
    before = [nodes for at, nodes in trace.changes if at <= begin][-1]
    points = [(begin, before), *(point for point in trace.changes if begin < point[0] < begin + seconds)]
    scaled = [((at - begin) / compress, min(WORKERS, nodes // nodes_each)) for at, nodes in points]
    changes = [point for index, point in enumerate(scaled) if index == 0 or point[1] != scaled[index - 1][1]]
    return Trace(tuple(changes), seconds / compress)


def main() -> None:
    """Measure, print and write the result."""
    default = Path(__file__).parents[1] / "examples" / "traces" / "p3-32.csv"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=default, help="CSV of spot nodes over time")
    parser.add_argument("--begin", type=float, default=0.0, help="seconds of the trace to skip")
    parser.add_argument("--seconds", type=float, default=7200.0, help="seconds of the trace to replay")
    parser.add_argument("--compress", type=float, default=8.0, help="factor by which the trace is sped up")
    parser.add_argument("--nodes-each", type=int, default=12, help="number of nodes of the trace per node here")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--supervise", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.supervise:
        supervise(options.supervise)
        return
    trace = select_part(read_trace(options.trace), options.begin, options.seconds, options.compress, options.nodes_each)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), trace)
    machine = describe_machine("ray", "torch", "deepspeed", "transformers")
    replayed = {name: str(value) for name, value in vars(options).items() if name not in ("output", "supervise")}
    replayed["trace"] = options.trace.name
    result = json.dumps({"machine": machine, "replayed": replayed, **measured}, indent=2)
    print(result)
    if options.output:
        options.output.write_text(result + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
