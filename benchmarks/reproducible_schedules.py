r"""Checks that runs whose world size changes at every loss end with one SHA-256 by `execution.reproducible: worldSize`.

Each seeded schedule trains a tiny Llama with dropout. It starts on 1, 2, 3, 4 or 8 ranks at ZeRO stage 0, 1 or 2. A
random rank kills itself before a random step; the next generation resumes from the last commit with another number of
ranks, and so on, two or three times. Masters, moments, the exported weights and the losses of all
steps go into a digest. As a control, two undisturbed runs without the setting on one and on two ranks are compared in
the same way. Ranks are processes in a gloo group, without Ray.

    PYTHONPATH=. python benchmarks/reproducible_schedules.py --schedules 100 \
        --output benchmarks/results/reproducible_schedules.json
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training.worker import Worker
from tests.trainer.support.groups import GroupFailedError
from tests.trainer.support.measured import publish
from tests.trainer.support.runs import MICRO_BATCH, STEPS, Layout, Runs, committed_state, train_generation

WORLD_SIZES = (1, 2, 3, 4, 8)
STAGES = (0, 1, 2)
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
            train_generation(directory, job, Layout(generation.world_size, generation.zero_stage), DyingWorker)
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


def main() -> None:
    """Play the schedules; print and write what they ended with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        runs = Runs(Path(root))
        job = make_job(runs, "worldSize")
        undisturbed = digest(play(runs, job, [Generation(1, 0)]))
        played: list[dict[str, Any]] = []
        for seed in range(options.first_seed, options.first_seed + options.schedules):
            generations = schedule(seed)
            found = digest(play(runs, job, generations))
            sys.stderr.write(f"schedule {seed}: {found[:16]}\n")
            played.append({"seed": seed, "generations": [asdict(each) for each in generations], "sha256": found})
        usual = make_job(runs, "none")
        control = [digest(play(runs, usual, [Generation(size, 1)])) for size in (1, 2)]
    publish(
        {
            "machine": {"device": "CPU", **{name: version(name) for name in ("torch", "deepspeed", "transformers")}},
            "steps": STEPS,
            "schedules": len(played),
            "losses": sum(len(each["generations"]) - 1 for each in played),
            "undisturbed": undisturbed,
            "endedWith": dict(Counter(each["sha256"] for each in played)),
            "withoutTheSetting": {"1 rank": control[0], "2 ranks": control[1]},
            "played": played,
        },
        options.output,
    )


if __name__ == "__main__":
    main()
