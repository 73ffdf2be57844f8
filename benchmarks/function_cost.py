"""What a training function pays for running under spotune: the start, and each step.

The same function (`function_cost_steps.py`) trains a small network on two CPU workers with one thread each: under the
bare `ray.train.torch.TorchTrainer`, and by `spotune run`, where it reports by Ray Train or by `spotune_train`. The
three arms run by turns, several rounds. Wall time of a step says little on a machine with other work, so each figure
has the CPU time of the rank's process (all its threads) beside it, and the calls of the layer are timed, too. Their
wall time includes the wait for the other worker.

    python -m benchmarks.function_cost --output benchmarks/results/function_cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer.job_directory.layout import JobDirectory
from tests.provenance import commit, machine
from tests.trainer.support.live import LiveRun
from tests.trainer.support.measured import publish

BARE, BY_RAY, BY_LIBRARY = "bare TorchTrainer", "spotune, ray.train.report", "spotune, spotune_train"
ARMS = (BARE, BY_RAY, BY_LIBRARY)
STEPS = 140
BLOCK_STEPS = 10
SAVE_EVERY_STEPS = 100
WARM_UP_STEPS = 20
TIMEOUT_SECONDS = 420.0
TIMES = (
    "milliseconds",
    "cpuMilliseconds",
    "dataMilliseconds",
    "dataCpuMilliseconds",
    "callMilliseconds",
    "callCpuMilliseconds",
)
"""Of a step: as a whole, in the loop over its rows, and in the calls of the layer."""
_LIKE_WORKERS = {"OMP_NUM_THREADS": "1"}


def run_bare(folder: Path, config: dict[str, Any]) -> None:
    """Run the function under the bare `TorchTrainer`, in a process of its own."""
    token = folder / "token"
    token.write_text("0" * 64)  # of the local Ray, which otherwise writes one to the home folder
    environment = {**os.environ, **_LIKE_WORKERS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    command = [sys.executable, "-m", "benchmarks.function_cost_steps", json.dumps(config)]
    log = (folder / "bare.log").open("wb")
    with log, subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            status = process.wait(TIMEOUT_SECONDS)
        finally:
            if process.poll() is None:  # its Ray ends with it
                os.killpg(process.pid, signal.SIGKILL)
    if status:
        raise RuntimeError((folder / "bare.log").read_text()[-3000:])


def run_spotune(folder: Path, config: dict[str, Any]) -> None:
    """Run the function by `spotune run`."""
    training = {"function": "function_cost_steps:train", "code": str(Path(__file__).parent), "config": config}
    spec = {"training": training, "workers": {"count": 2, "gpus": 0}}
    kind = {"apiVersion": "spotune.dev/v1alpha1", "kind": "FinetuneJob"}
    job = FinetuneJob.model_validate({**kind, "metadata": {"name": "cost"}, "spec": spec})
    run = LiveRun(JobDirectory(folder / "run"), job, _LIKE_WORKERS, TIMEOUT_SECONDS)
    try:
        run.start()
        status, output = run.wait()
    finally:
        run.clean_up()
    if status:
        raise RuntimeError(output[-3000:])


def measure(arm: str, steps: int) -> dict[str, Any]:
    """Run one arm once; returns its start and the medians of its steps on rank 0, in seconds and milliseconds."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        config = {
            "library": arm == BY_LIBRARY,
            "steps": steps,
            "blockSteps": BLOCK_STEPS if arm != BARE else 0,
            "saveEverySteps": SAVE_EVERY_STEPS,
            "output": str(folder),
            "launched": time.time(),
        }
        (run_bare if arm == BARE else run_spotune)(folder, config)
        found = json.loads((folder / "rank-0.json").read_text())
    return {"startSeconds": round(found["startSeconds"], 2), **summarize(found["steps"][WARM_UP_STEPS:])}


def summarize(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over steps that report, that do not, and over those that save."""
    saving = [line for line in lines if line["saves"]]
    kinds = {
        "reporting": [line for line in lines if line["reports"] and not line["saves"]],
        "silent": [line for line in lines if not line["reports"] and not line["saves"]],
    }
    result = {kind: {field: _median(of_kind, field) for field in TIMES} for kind, of_kind in kinds.items() if of_kind}
    result["saving"] = {field: _median(saving, field) for field in ("callMilliseconds", "callCpuMilliseconds")}
    return result


def _median(lines: Sequence[dict[str, Any]], field: str) -> float:
    return round(statistics.median(float(line[field]) for line in lines), 4)


def compare(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each arm beside the bare one of the same round: medians over the rounds, and the spread of the ratios."""
    return {arm: _spreads([_ratios(each, arm) for each in rounds]) for arm in (BY_RAY, BY_LIBRARY)}


def _ratios(measured: dict[str, Any], arm: str) -> dict[str, float]:
    """What an arm costs in one round."""
    bare, mine, silent = measured[BARE]["silent"], measured[arm]["reporting"], measured[arm]["silent"]
    found = {"start against bare": measured[arm]["startSeconds"] / measured[BARE]["startSeconds"]}
    for name, step, call in (
        ("wall", "milliseconds", "callMilliseconds"),
        ("CPU", "cpuMilliseconds", "callCpuMilliseconds"),
    ):
        found |= {
            f"step against bare, {name}": mine[step] / bare[step],
            f"step that reports against one that does not, {name}": mine[step] / silent[step],
            f"part of a step in report, {name}": mine[call] / mine[step],
        }
    return found


def _spreads(ratios: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, smallest and largest value of each ratio over the rounds."""
    found = {}
    for name in ratios[0]:
        values = [each[name] for each in ratios]
        spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        found[name] = {how: round(value, 4) for how, value in spread.items()}
    return found


def main() -> None:
    """Measure all arms by turns, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of each arm")
    parser.add_argument("--steps", type=int, default=STEPS, help="number of steps of each run")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    origin = {"commit": commit(), "machine": machine()}
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        measured: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}
        for arm in ARMS:
            measured[arm] = measure(arm, options.steps)
            sys.stderr.write(f"round {number + 1}, {arm}: {json.dumps(measured[arm])}\n")
        rounds.append(measured)
        publish({**origin, "compared": compare(rounds), "rounds": rounds}, options.output)


if __name__ == "__main__":
    main()
