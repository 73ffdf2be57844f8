"""Compares two ways to start a worker group after a killed rank: in the processes that are left, and in new ones.

`spotune run` trains with four CPU workers (gloo) and commits all the time. `kill -9` ends one rank after the other. In
one way the other ranks keep their processes for the next group (docs/adr/0057); in the other way all ranks are forked
anew, as before. Runs of both ways take turns. A recovery ends with the first step of the next group. Its parts:

* leave: until the driver knows that the group has ended;
* decide: until it has claimed the next generation;
* process: until rank 0 of that generation begins;
* data, model, engine, restore, firstStep: `startup` in rank 0's progress.json.

    python -m benchmarks.recovery_processes --output benchmarks/results/recovery_processes.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import latest_generation
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.live import LiveRun, kill
from tests.trainer.support.measured import LLAMAS, make_llama_job

WORKERS = 4
MODELS = {"tiny": LLAMAS["tiny"], "larger": LLAMAS["small"] | {"num_hidden_layers": 12}}
WAYS = {"new processes": "0", "kept processes": "1"}
"""Values of the environment variable by way."""
STEPS_BETWEEN_KILLS = 5
STARTUP = ("data", "model", "engine", "restore", "firstStep")


def measure(job: FinetuneJob, directory: JobDirectory, kept: str, kills: int) -> list[dict[str, float]]:
    """The recoveries of one run, in seconds by part."""
    run = LiveRun(directory, job, {"SPOTUNE_KEEP_RANK_PROCESSES": kept})
    run.start()
    try:
        run.wait_for_step(1)
        return [recover(run, number % WORKERS, expect_kept=kept == "1") for number in range(kills)]
    finally:
        run.clean_up()


def recover(run: LiveRun, rank: int, *, expect_kept: bool) -> dict[str, float]:
    """Kill a rank once there is a commit of its generation; returns the seconds of the recovery by part."""
    generation = latest_generation(run.directory)
    commits = f"step-*.gen-{generation}/manifest.json"
    run.wait_until(lambda: any(run.directory.checkpoints.glob(commits)), "a commit")
    run.wait_for_step(run.last_step() + STEPS_BETWEEN_KILLS)
    before = run.ranks()
    killed = time.time()
    kill(before[rank])
    run.wait_until(lambda: latest_generation(run.directory) > generation, "the next generation")
    logs = run.directory.generation_logs(generation + 1)
    run.wait_until(lambda: "firstStep" in startup(logs.progress)[1], "the first step")
    kept = {number for number, process in run.ranks().items() if process == before[number]}
    assert kept == (set(range(WORKERS)) - {rank} if expect_kept else set()), kept
    failed = run.events("failure")[-1]["time"]
    claimed = run.events("generation-started")[-1]["time"]
    started, parts = startup(logs.progress)
    found = {"leave": failed - killed, "decide": claimed - failed, "process": started - claimed}
    found |= {name: parts[name] for name in STARTUP}
    return {name: round(seconds, 3) for name, seconds in found.items()} | {"all": round(sum(found.values()), 3)}


def startup(progress: Path) -> tuple[float, dict[str, float]]:
    """When rank 0 began, in seconds since the epoch, and the parts of its start; both empty before it has begun."""
    content = files.read_json(progress) or {"startedAt": 0.0, "startup": {}}
    return content["startedAt"], content["startup"]


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=WORKERS, help="ranks to kill in each run, one after the other")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine("ray", "torch", "deepspeed", "transformers"), "models": {}}
    for model in options.models:
        recoveries: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        with tempfile.TemporaryDirectory() as folder:
            LLAMAS["measured"] = MODELS[model]
            sections: dict[str, dict[str, Any]] = {
                "workers": {"count": WORKERS, "gpus": 0},
                "execution": {"zeroStage": 2, "microBatchSize": 1},
                "retry": {"backoff": {"initial": "1s", "max": "1s"}},
            }
            job = make_llama_job(Path(folder), "measured", batch=WORKERS, length=32, sections=sections, every=1, keep=1)
            for number in range(options.rounds):
                for way, kept in WAYS.items():
                    directory = JobDirectory(Path(folder) / f"{way} {number}".replace(" ", "-"))
                    recoveries[way] += measure(job, directory, kept, options.kills)
                    print(model, way, recoveries[way][-options.kills :], flush=True)
        result["models"][model] = {
            way: {"medianSeconds": medians(found), "recoveries": found} for way, found in recoveries.items()
        }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def medians(recoveries: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds of each part."""
    return {part: round(statistics.median(each[part] for each in recoveries), 3) for part in recoveries[0]}


if __name__ == "__main__":
    main()
