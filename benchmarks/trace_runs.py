r"""Plays spot traces to a real run, and compares its kept share with what `spotune simulate` says for the same trace.

A small Llama trains on the CPU (gloo), one rank on each node. Every node is a raylet of one slot beside a head that has
none. By the trace, nodes join, are announced to go two minutes ahead as on AWS, and are killed with all of their
processes. The kept share is the goodput of `status.json` at the end of the trace. The simulation gets the times at
which nodes really were there, and the durations of steps, commits and starts from the ledger of the run.
docs/traces.md has the rule by which a trace is scaled and cut, and the results.

    python -m benchmarks.trace_runs --output benchmarks/results/trace_runs.json

Traces that the output has already are not run again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.trace_cutting import CutTrace, cut, most_nodes
from benchmarks.trace_nodes import Nodes
from spotune.errors import StoppedError
from spotune.job import FinetuneJob
from spotune.simulate.measured import read_timings
from spotune.simulate.simulation import simulate
from spotune.simulate.terms import Scenario, Timings
from spotune.simulate.trace import Trace, read_trace
from spotune_trainer import files
from spotune_trainer.job_directory.job import put_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.lock import locked
from spotune_trainer.observability.goodput import TIMELINE_EVENTS
from spotune_trainer.supervisor.console import PlainView
from spotune_trainer.supervisor.http_server import ProgressServer
from spotune_trainer.supervisor.ray_head.local import LocalRay
from spotune_trainer.supervisor.supervisor import Supervisor
from tests.trainer.support.measured import make_llama_job

FOLDER = Path(__file__).parent / "traces"
TRACES = {
    "LADP": "parcae-LADP.csv",
    "HADP": "parcae-HADP.csv",
    "HASP": "parcae-HASP.csv",
    "LASP": "parcae-LASP.csv",
    "Bamboo": "bamboo-p3.csv",
}
NOTICE_SECONDS = 120.0
"""AWS announces the loss of a spot node two minutes ahead; all five traces were recorded there."""
RESIZE_COOLDOWN_SECONDS = 30.0
QUIET_SECONDS = 180.0
"""A minute in which the run recovers from a change and grows, and the notice of the next one."""
PLAYED_SECONDS = 1200.0
_ROWS, _LENGTH = 24, 64
_SAMPLE_SECONDS = 10.0
_POLL_SECONDS = 0.1
_START_SECONDS = 900.0
_EVENTS = (*TIMELINE_EVENTS, "leaving", "growth-postponed", "joined", "replaced")


class RayWithNodes(LocalRay):
    """A head without slots, with nodes beside it that have joined before the first driver starts."""

    def __init__(self, directory: Path, count: int) -> None:
        super().__init__(directory, 0, gpus=False)
        self._count = count
        self.nodes: Nodes | None = None

    def start(self) -> None:
        """Start the head and its nodes."""
        super().start()
        assert self.running is not None, "it has just been started"
        nodes = Nodes(self.running)
        nodes.join(self._count)
        nodes.wait()
        self.nodes = nodes


@dataclass(frozen=True)
class Played:
    """A run that was made.

    Attributes:
        directory: of the job.
        status: at the end of the trace.
        nodes: those that were there.
        began: the start of the first driver, in seconds since the epoch.
        samples: (seconds, goodput so far).
    """

    directory: JobDirectory
    status: dict[str, Any]
    nodes: Nodes
    began: float
    samples: list[tuple[float, float]]


def play(root: Path, trace: Trace, workers: int, notice: float) -> Played:
    """Train while the nodes come and go by the trace. Must be called in the main thread: the supervisor has signals."""
    job = make_job(root, workers)
    directory = JobDirectory(root / "job")
    directory.root.mkdir()
    put_job(directory, job)
    ray = RayWithNodes(directory.root, trace.changes[0][1])
    ended = threading.Event()
    try:
        with ThreadPoolExecutor(1) as threads:
            played = threads.submit(_follow, directory, ray, trace, notice, ended)
            try:
                _supervise(directory, job, ray)
            finally:
                ended.set()
            return played.result()
    finally:
        if ray.nodes is not None:
            ray.nodes.shut_down()
        ray.shut_down()


def make_job(folder: Path, workers: int) -> FinetuneJob:
    """A job of a small model that is too long to finish."""
    return make_llama_job(
        folder,
        "tiny",
        _ROWS,
        _LENGTH,
        {
            "model": {"dtype": "float32"},
            "execution": {"zeroStage": 2, "microBatchSize": 1},
            "workers": {"count": workers, "min": 1, "gpus": 0, "resizeCooldown": f"{RESIZE_COOLDOWN_SECONDS:g}s"},
        },
    )


def _supervise(directory: JobDirectory, job: FinetuneJob, ray: LocalRay) -> None:
    """What `spotune run` does, with another Ray."""
    with (directory.root / "supervisor.log").open("w", buffering=1) as log:
        supervisor = Supervisor(directory, lambda: job.spec.retry, ray, PlainView(partial(print, file=log)))
        with (
            locked(directory),
            ProgressServer(directory, supervisor.health_problem) as server,
            suppress(StoppedError),
        ):
            supervisor.run(server.url)


def _follow(directory: JobDirectory, ray: RayWithNodes, trace: Trace, notice: float, ended: threading.Event) -> Played:
    """Make the nodes come and go until the trace ends, then stop the run."""
    try:
        began = _wait_for_attempt(directory, ended)
        nodes = ray.nodes
        assert nodes is not None, "the first driver starts after them"
        nodes.changes[:] = [(began, trace.changes[0][1])]
        actions = schedule(trace, notice)
        samples: list[tuple[float, float]] = []
        while (now := time.time() - began) < trace.seconds:
            if ended.wait(_POLL_SECONDS):
                raise RuntimeError("the run has ended before the trace")
            nodes.poll()
            while actions and actions[0].seconds <= now:
                actions.pop(0).apply(nodes, began)
            if not samples or now - samples[-1][0] >= _SAMPLE_SECONDS:
                status = files.read_json(directory.status) or {}
                if status.get("goodput") is not None:
                    samples.append((round(now, 1), status["goodput"]))
        return Played(directory, files.read_json(directory.status) or {}, nodes, began, samples)
    finally:
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # the workers commit and leave


def _wait_for_attempt(directory: JobDirectory, ended: threading.Event) -> float:
    """The start time of the first attempt, from which wall-clock time counts."""
    until = time.time() + _START_SECONDS
    while not (started := Ledger(directory).records("attempt-started")):
        if ended.wait(_POLL_SECONDS) or time.time() > until:
            raise RuntimeError("the first driver does not start")
    return float(started[0]["time"])


@dataclass(frozen=True, order=True)
class Action:
    """A change of the nodes.

    Attributes:
        seconds: when, after the start of the trace.
        joining: nodes that join.
        lost: nodes that are lost, at once or at their deadline.
        deadline: when announced nodes are lost; None: at once.
    """

    seconds: float
    joining: int = 0
    lost: int = 0
    deadline: float | None = None

    def apply(self, nodes: Nodes, began: float) -> None:
        """Make it happen."""
        if self.joining:
            nodes.join(self.joining)
        elif self.deadline is not None:
            nodes.announce(self.lost, began + self.deadline)
        else:
            nodes.kill(self.lost)


def schedule(trace: Trace, notice: float) -> list[Action]:
    """What happens to the nodes, in order of time: each loss is announced `notice` seconds ahead, if that is not 0."""
    actions = []
    for (_, before), (seconds, after) in zip(trace.changes, trace.changes[1:], strict=False):
        if after > before:
            actions.append(Action(seconds, joining=after - before))
            continue
        actions.append(Action(seconds, lost=before - after))
        if notice:
            actions.append(Action(max(0.0, seconds - notice), lost=before - after, deadline=seconds))
    return sorted(actions, key=lambda action: action.seconds)


def result_of(played: Played, cut_trace: CutTrace, workers: int, notice: float) -> dict[str, Any]:
    """What was measured, and what is simulated for the nodes that were there."""
    status, began = played.status, played.began
    seconds = status["time"] - began
    times = read_timings(played.directory.root, Timings(step={}))
    if not Ledger(played.directory).records("restored"):
        times = replace(times, restore=times.commit)  # as the driver expects
    points = {max(0.0, round(at - began, 3)): count for at, count in played.nodes.changes if at - began < seconds}
    happened = Trace(tuple(sorted(points.items())), seconds)
    scenario = played_scenario(workers, notice)
    predicted = simulate(happened, scenario, times)
    return {
        "seconds": round(seconds, 1),
        "measuredSeconds": seconds,
        "changes": cut_trace.changes,
        "changesOfWhole": cut_trace.scaled_changes,
        "coveredSeconds": round(cut_trace.covered_seconds, 1),
        "asked": cut_trace.trace.changes,
        "nodes": happened.changes,
        "groups": len(Ledger(played.directory).records("generation-started")),
        "restarts": status["restarts"],
        "steps": status["step"],
        "stepsLost": status["stepsLost"],
        "predictedSteps": predicted.steps,
        "predictedStepsLost": predicted.steps_lost,
        "predictedRestarts": predicted.restarts,
        "times": vars(times),
        "parts": {
            part: {"measured": value, "predicted": round(predicted.spent[part], 3)}
            for part, value in status["goodputParts"].items()
        },
        "keptShare": status["goodput"],
        "predictedKeptShare": round(predicted.goodput, 4),
        "points": round(100 * (predicted.goodput - status["goodput"]), 2),
        "samples": played.samples,
        "events": [_event(record, began) for record in Ledger(played.directory).records(*_EVENTS)],
    }


def played_scenario(workers: int, notice: float) -> Scenario:
    """The choices of the job that is run."""
    return Scenario(workers=workers, resize_cooldown=RESIZE_COOLDOWN_SECONDS, notice=notice)


def whole_scenario(trace: Trace) -> Scenario:
    """The job on a whole trace, with default settings and as many workers as the trace has nodes at most."""
    return Scenario(workers=most_nodes(trace), notice=NOTICE_SECONDS)


def _event(record: dict[str, Any], began: float) -> dict[str, Any]:
    """An event of the ledger, with the seconds since the start of the run."""
    at = round(record["time"] - began, 2)
    return {"at": at, **{name: value for name, value in record.items() if name not in ("time", "message", "measured")}}


def main() -> None:
    """Run what the output does not have yet, and write it after each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--workers", type=int, default=8, help="the most nodes")
    parser.add_argument("--notice", type=float, default=NOTICE_SECONDS, help="seconds; 0: nodes are lost without")
    parser.add_argument("--quiet", type=float, default=QUIET_SECONDS, help="longest time between two changes, seconds")
    parser.add_argument("--seconds", type=float, default=PLAYED_SECONDS, help="longest run of a trace")
    parser.add_argument("--keep", type=Path, help="keep the job's directories in this folder")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    for name in options.traces:
        if name in read_results(options.output):
            continue
        trace = read_trace(FOLDER / TRACES[name])
        cut_trace = cut(trace, options.workers, options.quiet, options.seconds)
        with tempfile.TemporaryDirectory() as folder:
            played = play(Path(folder), cut_trace.trace, options.workers, options.notice)
            found = result_of(played, cut_trace, options.workers, options.notice)
        add_result(
            name,
            {
                "machine": describe_machine("ray", "torch", "deepspeed", "transformers"),
                "mostNodes": most_nodes(trace),
                "workers": options.workers,
                "noticeSeconds": options.notice,
                "quietSeconds": options.quiet,
                **found,
            },
            options.output,
        )


def read_results(output: Path | None) -> dict[str, Any]:
    """The results that an output has, by trace."""
    if output is None or not output.exists() or not output.stat().st_size:
        return {}
    traces: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))["traces"]
    return traces


def add_result(name: str, found: dict[str, Any], output: Path | None) -> None:
    """Print the result of a trace, and add it to an output. Other processes may add those of other traces."""
    print(json.dumps({name: found}, indent=2))
    if output is None:
        return
    with output.open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        traces = read_results(output) | {name: found}
        ordered = {each: traces[each] for each in TRACES if each in traces}
        output.write_text(json.dumps({"traces": ordered}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
