r"""Measures how much a full checkpoint, written in the background, slows down training steps on GPUs.

Trains a Llama with random weights on random tokens, with the trainer's own worker. The worker commits repeatedly, with
undisturbed steps in between. The steps from the start of a commit until it is durable are compared with the undisturbed
ones. Does not use Ray: torchrun starts the ranks.

    PYTHONPATH=. torchrun --nproc-per-node 1 benchmarks/commit_stall.py --size 1.1B \
        --output benchmarks/results/commit_stall_1.json
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spotune_trainer import files
from spotune_trainer.checkpoint.async_checkpointer import CommitResult
from spotune_trainer.engine.zero_state import parameter_shapes
from spotune_trainer.job_directory.layout import GenerationLogs, JobDirectory
from spotune_trainer.job_directory.notice import Flags
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import WorkerTask
from tests.trainer.support.measured import (
    LLAMAS,
    QuicklyBuiltWorker,
    from_first_rank,
    machine,
    make_llama_job,
    publish,
    torchrun_group,
)
from tests.trainer.support.runs import Layout, make_task, start_generation

WARM_UP_STEPS = 5


class CommittingWorker(QuicklyBuiltWorker):
    """A worker that commits repeatedly, with undisturbed steps in between, and then stops.

    Args:
        commits: number of commits.
        free_steps: undisturbed steps between the end of one commit and the start of the next.
        alone: whether to delete each checkpoint before the next one is written, for volumes with space for one only.

    Attributes:
        undisturbed: numbers of the steps during which no commit ran (rank 0).
        are_copied_within_device: for each commit, whether the GPU had enough free memory for the copy.
    """

    def __init__(
        self,
        task: WorkerTask,
        rank: int,
        world_size: int,
        reporter: ProgressReporter,
        commits: int,
        free_steps: int,
        alone: bool,
    ) -> None:
        super().__init__(task, rank, world_size, reporter)
        self.commits_left = commits
        self.free_steps = free_steps
        self.alone = alone
        self.undisturbed: list[int] = []
        self.are_copied_within_device: list[bool] = []
        self._last_busy = WARM_UP_STEPS
        self._removing: threading.Thread | None = None

    def commit(self, step: int) -> None:
        """Start a commit, and record where its copy is made."""
        super().commit(step)
        self.are_copied_within_device.append(
            torch.cuda.is_available() and not self.checkpointing.checkpointer._snapshot._reads_originals
        )

    def set_up(self) -> None:
        """Remove each checkpoint once it is recorded, if asked to."""
        super().set_up()
        record = self.checkpointing._record

        def record_and_remove(result: CommitResult | None) -> None:
            record(result)
            self._remove(result)

        self.checkpointing._record = record_and_remove  # type: ignore[method-assign]

    def _remove(self, result: CommitResult | None) -> None:
        if result is not None and self.alone and self.rank == 0:
            folder = self.context.directory.checkpoints / str(result.name)
            self._removing = threading.Thread(target=shutil.rmtree, args=(folder,))
            self._removing.start()

    def propose_flags(self, step: int) -> Flags:
        """Commit after so many undisturbed steps; stop after the last commit."""
        if self.rank != 0:
            return Flags()
        if self._is_busy():
            self._last_busy = step
        elif step > WARM_UP_STEPS:
            self.undisturbed.append(step)
        noticed = self.notices.flags(self.checkpointing.commit_seconds)
        if step - self._last_busy < self.free_steps:
            return noticed
        self._last_busy = step
        self.commits_left -= 1
        return noticed | Flags(commit=self.commits_left >= 0, stop=self.commits_left < 0)

    def _is_busy(self) -> bool:
        threads = (self.checkpointing.checkpointer._reservation, self._removing)
        return self.checkpointing.checkpointer.is_busy or any(
            thread is not None and thread.is_alive() for thread in threads
        )


def make_first_task(root: Path, options: argparse.Namespace, world_size: int) -> WorkerTask:
    """The task of the first generation's ranks, with the files it needs in a folder."""
    directory = JobDirectory(root / "job")
    directory.root.mkdir()
    job = make_llama_job(root, options.size, options.batch, options.length, keep=1)
    layout, micro_batch = Layout(world_size, options.zero_stage), options.micro_batch or options.batch // world_size
    return make_task(directory, job, layout, start_generation(directory), micro_batch)


def cost(logs: GenerationLogs, undisturbed: Sequence[int]) -> dict[str, Any]:
    """The cost of each commit: seconds by which its steps exceed the median undisturbed step."""
    seconds = [record["seconds"] for record in files.read_lines(logs.steps)]
    commits = [event for event in files.read_lines(logs.events) if event["event"] == "committed"]
    spans = [_steps_within(seconds, event["step"], event["seconds"]) for event in commits]
    free = [seconds[step - 1] for step in undisturbed if step <= len(seconds)]
    usual = statistics.median(free)
    return {
        "commits": len(commits),
        "gigabytes": round(commits[0]["bytes"] / 1e9, 2),
        "writeSeconds": _spread([event["seconds"] for event in commits]),
        "stepSeconds": _spread(free),
        "stepSecondsBesideCommits": _spread([seconds[index] for span in spans for index in span]),
        "hostStallSeconds": _spread([event["stallSeconds"] for event in commits]),
        "firstStepExtraSeconds": _spread([seconds[span[0]] - usual for span in spans]),
        "allStepsExtraSeconds": _spread([sum(seconds[index] - usual for index in span) for span in spans]),
        "stepsOfACommit": _spread([len(span) for span in spans]),
        "eachCommit": [
            {
                "writeSeconds": event["seconds"],
                "hostStallSeconds": event["stallSeconds"],
                "allStepsExtraSeconds": round(sum(seconds[index] - usual for index in span), 4),
            }
            for event, span in zip(commits, spans, strict=True)
        ],
    }


def _steps_within(seconds: Sequence[float], first: int, duration: float) -> range:
    """Indices of the steps that ran within `duration` from the end of step `first` (counted from 1)."""
    passed, index = 0.0, first
    while index < len(seconds) and (passed < duration or index == first):
        passed += seconds[index]
        index += 1
    return range(first, index)


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "mean": round(statistics.mean(ordered), 4),
        "least": round(ordered[0], 4),
        "most": round(ordered[-1], 4),
    }


def file_system(folder: Path) -> str:
    """Type of the file system of a folder, such as ext4 or tmpfs."""
    command = ["stat", "--file-system", "--format", "%T", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Train; rank 0 prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=LLAMAS, default="1.1B", help="size of the model")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="rows per step, over all GPUs")
    parser.add_argument("--micro-batch", type=int, help="rows per forward pass; default: all")
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--commits", type=int, default=11, help="number of commits")
    parser.add_argument("--free-steps", type=int, default=20, help="undisturbed steps between two commits")
    parser.add_argument("--folder", type=Path, help="folder for checkpoints")
    parser.add_argument("--alone", action="store_true", help="delete each checkpoint before the next one")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    with torchrun_group() as (rank, world_size):
        root = Path(tempfile.mkdtemp(dir=options.folder)) if rank == 0 else None
        task = make_first_task(root, options, world_size) if root else None
        task = from_first_rank(task)
        directory = JobDirectory(Path(task.directory))
        logs = directory.generation_logs(task.generation)
        with ProgressReporter(logs, rank, hang_timeout_seconds=600) as reporter:
            worker = CommittingWorker(
                task, rank, world_size, reporter, options.commits, options.free_steps, options.alone
            )
            worker.train()
        if root:
            shapes = parameter_shapes(worker.context.engine).values()
            found = {
                "machine": machine(),
                "fileSystem": file_system(root),
                "model": options.size,
                "parameters": sum(math.prod(shape) for shape in shapes),
                "dtype": "bfloat16",
                "zeroStage": options.zero_stage,
                "tokensPerStep": options.batch * options.length,
                "copiedWithinDevice": worker.are_copied_within_device,
                **cost(logs, worker.undisturbed),
            }
            publish(found, options.output)
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
