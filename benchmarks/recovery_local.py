"""Compares the recovery from a killed worker with the cold start of the same worker group, in one run on one machine.

Starts `spotune run` on a small T5 with two CPU workers, which commits after every step. The cold start is the time from
the driver's claim of the first generation to its first step. A recovery is the time from `kill -9` of a worker to the
next step that was not reached before. Both include the start of a worker group. Only their ratio is meaningful, because
these machines are shared and slow.

    python -m benchmarks.recovery_local --output benchmarks/results/recovery_local.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from spotune_trainer import files
from tests.trainer.support.live import LiveRun, kill
from tests.trainer.support.measured import publish
from tests.trainer.support.runs import STEPS_PER_EPOCH, Runs

STEPS_BETWEEN_KILLS = 5


def measure(root: Path, kills: int) -> dict[str, Any]:
    """The cold start and the recoveries of one run, in seconds."""
    runs = Runs(root)
    epochs = 40 + kills * STEPS_BETWEEN_KILLS // STEPS_PER_EPOCH
    job = runs.job(
        training={"epochs": epochs},
        checkpoint={"every": 1},
        execution={"zeroStage": 2, "microBatchSize": 3},
        workers={"count": 2, "gpus": 0},
    )
    run = LiveRun(runs.empty("recovery"), job)
    started = time.time()
    run.start()
    try:
        run.wait_for_step(1)
        first_step = time.time()
        claimed = run.events("generation-started")[0]["time"]
        startup = (files.read_json(run.directory.status) or {})["startup"]
        recoveries = [recover(run) for _ in range(kills)]
    finally:
        run.clean_up()
    cold = first_step - claimed
    return {
        "fromCommandToFirstStepSeconds": round(first_step - started, 2),
        "startup": startup,
        "coldStartSeconds": round(cold, 2),
        "recoverySeconds": [round(seconds, 2) for seconds in recoveries],
        "medianRecoverySeconds": round(statistics.median(recoveries), 2),
        "ratio": round(statistics.median(recoveries) / cold, 3),
    }


def recover(run: LiveRun) -> float:
    """Kill a worker and wait for the next new step."""
    begun = run.last_step()
    run.wait_for_step(begun + STEPS_BETWEEN_KILLS)
    worker = run.workers()[0]
    return run.seconds_to_new_step(lambda: kill(worker))


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="number of workers to kill, one after the other")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options.kills)
    machine = describe_machine("ray", "torch", "deepspeed", "transformers")
    publish({"machine": machine, **measured}, options.output)


if __name__ == "__main__":
    main()
