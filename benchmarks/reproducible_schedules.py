r"""Checks that runs whose world size changes at every loss end with one SHA-256 by `execution.reproducible: worldSize`.

Each seeded schedule trains a tiny Llama with dropout. It starts on 1, 2, 3, 4 or 8 ranks at ZeRO stage 0, 1 or 2. A
random rank kills itself before a random step; the next generation resumes from the last commit with another number of
ranks, and so on, two or three times. Masters, moments, the exported weights and the losses of all
steps go into a digest. As a control, two undisturbed runs without the setting on one and on two ranks are compared in
the same way. Ranks are processes in a gloo group, without Ray.

Each schedule is recorded at once, and seeds with a record are skipped, so several sittings complete them; the records
of a machine without git name the commit that is given. The result is written from all records.

    PYTHONPATH=. python benchmarks/reproducible_schedules.py --schedules 100 --jobs 2 \
        --output benchmarks/results/reproducible_schedules.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.worker import Worker
from tests import ROOT
from tests.provenance import commit
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.measured import publish
from tests.trainer.support.runs import MICRO_BATCH, STEPS, Layout, Runs, committed_state, train_generation

WORLD_SIZES = (1, 2, 3, 4, 8)
STAGES = (0, 1, 2)
CONTROL_SIZES = (1, 2)
SHOWN = ("generations", "sha256")
DEVICE = f"{os.cpu_count()} cores"
LOSS = "loss.json"
"""In the job's folder: the rank that kills itself, and the step before which it does."""


@dataclass(frozen=True)
class Generation:
    """One worker group of a schedule.

    Attributes:
        world_size: number of ranks.
        zero_stage: their ZeRO stage.
        dies_before: 1-based step before which a rank kills itself; None: the group trains to the end.
        rank: that does.
    """

    world_size: int
    zero_stage: int
    dies_before: int | None = None
    rank: int = 0


class DyingWorker(Worker):
    """Kills its own process before a step, if `LOSS` names its rank."""

    def batches(self) -> Generator[MicroBatches]:
        """The micro-batches of each step."""
        loss = files.read_json(self.context.directory.root / LOSS) or {}
        for step, batches in enumerate(super().batches(), start=self.context.first_step + 1):
            if (step, self.rank) == (loss.get("step"), loss.get("rank")):
                os.kill(os.getpid(), signal.SIGKILL)
            yield batches


def schedule(seed: int) -> list[Generation]:
    """The generations of a schedule; each has another number of ranks than the one before."""
    chosen = random.Random(seed)
    generations: list[Generation] = []
    for dies_before in [*sorted(chosen.sample(range(2, STEPS + 1), chosen.choice((2, 3)))), None]:
        others = [size for size in WORLD_SIZES if not generations or size != generations[-1].world_size]
        world_size = chosen.choice(others)
        generations.append(Generation(world_size, chosen.choice(STAGES), dies_before, chosen.randrange(world_size)))
    return generations


def play(runs: Runs, job: FinetuneJob, generations: list[Generation]) -> JobDirectory:
    """Train the generations of a schedule, each from the last commit of those before."""
    directory = runs.empty("schedule")
    for generation in generations:
        loss = {"step": generation.dies_before, "rank": generation.rank}
        files.write_json(directory.root / LOSS, loss)
        try:
            train_generation(
                directory, job, Layout(generation.world_size, generation.zero_stage), DyingWorker, timeout=600
            )
        except GroupFailedError:
            assert generation.dies_before is not None, "only a killed rank may end a group"
        else:
            assert generation.dies_before is None, "the rank was to kill itself"
    return directory


def digest(run: JobDirectory) -> str:
    """SHA-256 of all states, the exported weights, and the losses and gradient norms of all steps."""
    found = hashlib.sha256()
    for name, tensor in sorted(committed_state(run, STEPS).items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    found.update((run.export / "model.safetensors").read_bytes())
    found.update(repr([(record["loss"], record["gradNorm"]) for record in surviving_steps(run)]).encode())
    return found.hexdigest()


def make_job(runs: Runs, reproducible: str) -> FinetuneJob:
    """The job of all schedules: a commit after every step."""
    execution = {"microBatchSize": MICRO_BATCH, "reproducible": reproducible}
    return runs.job("causal", execution=execution, checkpoint={"every": 1, "keep": 2})


def make_tasks(runs: Runs, commit_name: str, seeds: range) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is to be played, by name: the undisturbed run, the schedules, and the control."""
    job, usual = make_job(runs, "worldSize"), make_job(runs, "none")
    to_play = {"undisturbed": (job, [Generation(1, 0)])}
    to_play |= {f"schedule {seed}": (job, schedule(seed)) for seed in seeds}
    to_play |= {f"withoutTheSetting {size}": (usual, [Generation(size, 1)]) for size in CONTROL_SIZES}

    def record(name: str) -> dict[str, Any]:
        directory = play(runs, *to_play[name])
        found = {"name": name, "sha256": digest(directory), "commit": commit_name, "device": DEVICE}
        shutil.rmtree(directory.root)
        return {**found, "generations": [asdict(each) for each in to_play[name][1]]}

    return {name: partial(record, name) for name in to_play}


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """The records by name; of several with a name the last one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def result(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The result of all records."""
    seeds = sorted(int(name.split()[1]) for name in found if name.startswith("schedule "))
    played = [{"seed": seed, **{key: found[f"schedule {seed}"][key] for key in SHOWN}} for seed in seeds]
    return {
        "machine": {"device": "CPU", **{name: version(name) for name in ("torch", "deepspeed", "transformers")}},
        "commits": dict(Counter(record["commit"] for record in found.values())),
        "devices": dict(Counter(record["device"] for record in found.values())),
        "steps": STEPS,
        "schedules": len(played),
        "losses": sum(len(each["generations"]) - 1 for each in played),
        "undisturbed": found["undisturbed"]["sha256"],
        "endedWith": dict(Counter(each["sha256"] for each in played)),
        "withoutTheSetting": {
            f"{size} rank{'s' if size > 1 else ''}": found[f"withoutTheSetting {size}"]["sha256"]
            for size in CONTROL_SIZES
        },
        "played": played,
    }


def main() -> None:
    """Play what has no record yet; print and write what all of it ended with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="schedules in parallel, of up to eight ranks each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no further schedules after this time")
    parser.add_argument("--records", type=Path, default=ROOT / "build/reproducible_schedules.jsonl")
    parser.add_argument("--commit", help="the tested commit, where there is no git")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks train on CPUs
    options.records.parent.mkdir(parents=True, exist_ok=True)
    until, done = time.monotonic() + options.minutes * 60, read_records(options.records)
    seeds = range(options.first_seed, options.first_seed + options.schedules)
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(options.jobs) as pool:
        tasks = make_tasks(Runs(Path(root)), options.commit or commit(), seeds)
        missing = [task for name, task in tasks.items() if name not in done]

        def play_in_time(task: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
            return task() if time.monotonic() < until else None

        futures = [pool.submit(play_in_time, task) for task in missing]
        for future in as_completed(futures):
            record = future.result()
            if record is not None:
                with options.records.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                sys.stderr.write(f"{record['name']}: {record['sha256'][:16]}\n")
    found = read_records(options.records)
    if unplayed := sorted(tasks.keys() - found.keys()):
        sys.exit(f"{len(unplayed)} are left to play: run the same command again")
    publish(result(found), options.output)


if __name__ == "__main__":
    main()
