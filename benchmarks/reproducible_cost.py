r"""Measures what `execution.reproducible: worldSize` costs: step time with and without it, alternately in one run.

Trains two engines of one Llama with random weights side by side on the same random tokens, each with the trainer's own
worker: one with the setting, one without. Both use deterministic kernels, whose cost is measured elsewhere. They take
turns step by step, so that other load on the machine meets both. On a machine that does other work, processor seconds
say more than those of the clock. Does not use Ray: torchrun starts the ranks.

    PYTHONPATH=. OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/reproducible_cost.py \
        --output benchmarks/results/reproducible_cost.json
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import distributed

from spotune_trainer.engine.zero_state import parameter_shapes
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import Flags
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.training.worker import Worker
from tests.trainer.support.measured import LLAMAS, from_first_rank, machine, make_llama_job, publish, torchrun_group
from tests.trainer.support.runs import Layout, make_task, start_generation

Setting = Literal["none", "worldSize"]
SETTINGS: tuple[Setting, Setting] = ("none", "worldSize")
WARM_UP_STEPS = 2


def make_worker_task(root: Path, reproducible: Setting, options: argparse.Namespace, world_size: int) -> WorkerTask:
    """The task of the ranks of one of the two workers, with the files it needs in a folder."""
    folder = root / reproducible
    directory = JobDirectory(folder / "job")
    directory.root.mkdir(parents=True)
    execution = {"microBatchSize": options.micro_batch, "deterministic": True, "reproducible": reproducible}
    sections = {"execution": execution, "model": {"dtype": options.dtype}}
    job = make_llama_job(folder, options.size, options.batch, options.length, sections, every=1_000_000)
    layout = Layout(world_size, options.zero_stage)
    return make_task(directory, job, layout, start_generation(directory), options.micro_batch)


def steps_of(worker: Worker) -> Iterator[Any]:
    """Set a worker up, and train; yields after each step."""
    worker.set_up()
    return worker.loop.run(worker.batches(), 0, lambda _step: Flags())


@dataclass
class Seconds:
    """Seconds of each step with one setting: of the clock, and of the processor in this rank."""

    clock: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def add_step(self, steps: Iterator[Any]) -> None:
        """Let all ranks take the next step."""
        distributed.barrier()
        clock, processor = time.perf_counter(), time.process_time()
        next(steps)
        distributed.barrier()
        self.clock.append(round(time.perf_counter() - clock, 4))
        self.processor.append(round(time.process_time() - processor, 4))


def measure(of_settings: dict[Setting, Iterator[Any]], steps: int) -> dict[Setting, Seconds]:
    """Take steps after a warm-up; in each pair of steps another setting comes first."""
    found = {name: Seconds() for name in SETTINGS}
    for number in range(WARM_UP_STEPS + steps):
        if number == WARM_UP_STEPS:
            found = {name: Seconds() for name in SETTINGS}
        for name in SETTINGS if number % 2 else reversed(SETTINGS):
            found[name].add_step(of_settings[name])
    return found


def compare(without: Sequence[float], with_it: Sequence[float]) -> dict[str, float]:
    """Medians of both settings, and by how much the second is larger: of the medians, and the median over pairs."""
    medians = statistics.median(without), statistics.median(with_it)
    pairs = [second / first for first, second in zip(without, with_it, strict=True)]
    return {
        **{name: round(median, 4) for name, median in zip(SETTINGS, medians, strict=True)},
        "ratioOfMedians": round(medians[1] / medians[0], 4),
        "medianRatioOfPairs": round(statistics.median(pairs), 4),
    }


def main() -> None:
    """Train; rank 0 prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=LLAMAS, default="small", help="size of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16, help="rows per step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows per forward pass")
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each setting")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    with torchrun_group() as (rank, world_size), ExitStack() as stack:
        root = Path(tempfile.mkdtemp()) if rank == 0 else None
        tasks = {name: make_worker_task(root, name, options, world_size) for name in SETTINGS} if root else None
        of_settings, parameters = {}, 0
        for name, task in from_first_rank(tasks).items():
            logs = JobDirectory(Path(task.directory)).generation_logs(task.generation)
            reporter = stack.enter_context(ProgressReporter(logs, rank, hang_timeout_seconds=600))
            worker = Worker(task, rank, world_size, reporter)
            of_settings[name] = steps_of(worker)
            parameters = sum(math.prod(shape) for shape in parameter_shapes(worker.context.engine).values())
        seconds = measure(of_settings, options.steps)
        if root:
            found = {
                "machine": machine(),
                "model": options.size,
                "parameters": parameters,
                "dtype": options.dtype,
                "zeroStage": options.zero_stage,
                "tokensPerMicroBatch": options.micro_batch * options.length,
                "microBatchesPerStep": math.ceil(options.batch / options.micro_batch),
                "steps": options.steps,
                "clockSeconds": compare(seconds["none"].clock, seconds["worldSize"].clock),
                "processorSeconds": compare(seconds["none"].processor, seconds["worldSize"].processor),
                "eachStep": {name: asdict(of_steps) for name, of_steps in seconds.items()},
            }
            publish(found, options.output)
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
