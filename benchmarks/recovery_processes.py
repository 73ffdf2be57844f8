r"""Compares ways to start a worker group after a killed rank: in the processes that are left, and in new ones.

`spotune run` trains with four CPU workers (gloo) and commits all the time. `kill -9` ends one rank after the other. In
one way the other ranks keep their processes for the next group (docs/adr/0057); in the other way all ranks are forked
anew, as before. Runs of both ways take turns. A recovery ends with the first step of the next group. Its parts:

* leave: until the driver knows that the group has ended;
* decide: until it has claimed the next generation;
* process: until rank 0 of that generation begins;
* data, model, engine, restore, firstStep: `startup` in rank 0's progress.json.

    python -m benchmarks.recovery_processes --output benchmarks/results/recovery_processes.json

On GPUs, with one GPU per worker, two more ways are measured: new processes that read the volume, and compiled layers.

    python -m benchmarks.recovery_processes --gpus --workers 2 --models 1.1B --kills 4 --rounds 1 \
        --output benchmarks/results/recovery_processes_gpu_2.json

With `--before`, new processes of an earlier trainer take turns with those of this one:

    git archive v0.1.0 trainer | tar x -C /tmp/before
    python -m benchmarks.recovery_processes --gpus --workers 1 --models 1.1B --ways "new processes" \
        --before /tmp/before/trainer --output recovery.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import last_logged_step, latest_generation, list_generations
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.live import LiveRun, kill
from tests.trainer.support.measured import LLAMAS, make_llama_job, publish

MODELS = LLAMAS | {"larger": LLAMAS["small"] | {"num_hidden_layers": 12}}


@dataclass(frozen=True)
class Way:
    """How the next worker group starts.

    Attributes:
        keeps: whether the other ranks keep their processes.
        memory_copies: commits that each worker keeps in memory; "auto" is two where they fit.
        compile: whether layers are compiled.
        path: folder of another trainer's package, which is run instead; empty: this one.
    """

    keeps: bool
    memory_copies: int | str = "auto"
    compile: bool = False
    path: str = ""

    def environment(self) -> dict[str, str]:
        """Environment variables of the measured command."""
        keep = {"SPOTUNE_KEEP_RANK_PROCESSES": str(int(self.keeps))}
        if not self.path:
            return keep
        return keep | {"PYTHONPATH": os.pathsep.join(filter(None, (self.path, os.environ.get("PYTHONPATH"))))}


WAYS = {"new processes": Way(keeps=False), "kept processes": Way(keeps=True)}
GPU_WAYS = {
    "new processes, from the volume": Way(keeps=False, memory_copies=0),
    **WAYS,
    "new processes, compiled": Way(keeps=False, compile=True),
}
BEFORE = "new processes, before"
STEPS_BETWEEN_KILLS = 5
STARTUP = ("data", "model", "engine", "restore", "firstStep")


def measure(job: FinetuneJob, directory: JobDirectory, way: Way, kills: int) -> Iterator[dict[str, float]]:
    """Yield each recovery of one run, in seconds by part."""
    spec = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    spec["spec"]["checkpoint"]["memoryCopies"] = way.memory_copies
    spec["spec"]["execution"]["compile"] = way.compile
    job = FinetuneJob.model_validate(spec)
    run = LiveRun(directory, job, way.environment())
    run.start()
    try:
        run.wait_for_step(1)
        workers = job.spec.workers.count
        for number in range(kills):
            yield recover(run, number % workers, expect_kept=way.keeps)
    finally:
        run.clean_up()


def recover(run: LiveRun, rank: int, *, expect_kept: bool) -> dict[str, float]:
    """Kill a rank once there is a commit of its generation; returns the seconds of the recovery by part."""
    generation = latest_generation(run.directory)
    commits = f"step-*.gen-{generation}/manifest.json"
    run.wait_until(lambda: any(run.directory.checkpoints.glob(commits)), "a commit")
    # Beyond the last step of any group: without such progress, the driver would wait before it retries.
    made = [last_logged_step(run.directory, each.number, each.first_step) for each in list_generations(run.directory)]
    run.wait_for_step(max(made) + STEPS_BETWEEN_KILLS)
    before = run.ranks()
    killed = time.time()
    kill(before[rank])
    run.wait_until(lambda: latest_generation(run.directory) > generation, "the next generation")
    logs = run.directory.generation_logs(generation + 1)
    run.wait_until(lambda: "firstStep" in startup(logs.progress)[1], "the first step")
    kept = {number for number, process in run.ranks().items() if process == before[number]}
    assert kept == (set(before) - {rank} if expect_kept else set()), kept
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
    """Measure, and write what is measured so far after each recovery."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", action="store_true", help="one GPU per worker")
    parser.add_argument("--ways", nargs="+", choices=GPU_WAYS, help="by default all, those for GPUs only with --gpus")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=4, help="ranks to kill in each run, one after the other")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["tiny", "larger"])
    parser.add_argument("--rows", type=int, default=1, help="of a worker in each step")
    parser.add_argument("--length", type=int, default=32, help="tokens of a row")
    parser.add_argument("--every", type=int, default=1, help="steps between two commits")
    parser.add_argument("--before", help="folder of an earlier trainer's package, which takes turns")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    packages = ("ray", "torch", "deepspeed", "transformers")
    result: dict[str, Any] = {"machine": describe_machine(*packages), "models": {}}
    if options.gpus:
        result["machine"]["device"] = torch.cuda.get_device_name()
    workers, every = options.workers, options.every
    ways = {name: GPU_WAYS[name] for name in options.ways or (GPU_WAYS if options.gpus else WAYS)}
    if options.before:
        ways[BEFORE] = Way(keeps=False, path=options.before)
    for model in options.models:
        recoveries: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        with tempfile.TemporaryDirectory() as folder:
            LLAMAS["measured"] = MODELS[model]
            sections: dict[str, dict[str, Any]] = {
                "workers": {"count": workers, "gpus": int(options.gpus)},
                "execution": {"zeroStage": 2, "microBatchSize": options.rows},
                "retry": {"backoff": {"initial": "1s", "max": "1s"}},
            }
            batch = workers * options.rows
            job = make_llama_job(Path(folder), "measured", batch, options.length, sections, every=every, keep=1)
            for _ in range(options.rounds):
                for name, way in ways.items():
                    directory = JobDirectory(Path(folder) / "job")
                    for recovery in measure(job, directory, way, options.kills):
                        recoveries[name].append(recovery)
                        result["models"][model] = {
                            way: {"medianSeconds": medians(found), "recoveries": found}
                            for way, found in recoveries.items()
                            if found
                        }
                        publish(result, options.output)
                    shutil.rmtree(directory.root)


def medians(recoveries: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds of each part."""
    return {part: round(statistics.median(each[part] for each in recoveries), 3) for part in recoveries[0]}


if __name__ == "__main__":
    main()
