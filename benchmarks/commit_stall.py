r"""What a full checkpoint costs the steps of a training run on GPUs, while it is written in the background.

Trains a Llama with random weights on rows of random tokens by the trainer's own worker, which commits again and again
with steps in between beside which nothing is written. Compares the steps from the beginning of each commit until it is
durable with those. No Ray: the ranks come from torchrun.

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
from spotune_trainer.checkpoint.async_checkpointer import Committed
from spotune_trainer.engine.zero_state import parameter_shapes
from spotune_trainer.job_directory.layout import GenerationLogs, JobDirectory
from spotune_trainer.job_directory.notice import Flags
from spotune_trainer.observability.progress import Journal
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
    """Commits so many times, each after so many steps beside which nothing else was done, and stops.

    Args:
        commits: how many.
        free_steps: between the end of one and the beginning of the next.
        alone: whether a checkpoint is removed before the next one is written, on a volume that holds one only.

    Attributes:
        undisturbed: numbers of the steps beside which nothing was done (rank 0).
        are_copied_within_device: for each commit, whether the GPU had room for a copy.
    """

    def __init__(
        self, task: WorkerTask, rank: int, world_size: int, journal: Journal, commits: int, free_steps: int, alone: bool
    ) -> None:
        super().__init__(task, rank, world_size, journal)
        self.commits_left = commits
        self.free_steps = free_steps
        self.alone = alone
        self.undisturbed: list[int] = []
        self.are_copied_within_device: list[bool] = []
        self._last_busy = WARM_UP_STEPS
        self._removing: threading.Thread | None = None

    def commit(self, step: int) -> None:
        """Begin a commit, and note where its copy is taken."""
        super().commit(step)
        self.are_copied_within_device.append(torch.cuda.is_available() and not self.committer._snapshot._are_originals)

    def _take_in(self, ended: Committed | None) -> None:
        super()._take_in(ended)
        if ended is not None and self.alone and self.rank == 0:
            folder = self.directory.checkpoints / str(ended.name)
            self._removing = threading.Thread(target=shutil.rmtree, args=(folder,))
            self._removing.start()

    def _ask(self, step: int) -> Flags:
        if self.rank != 0:
            return Flags()
        if self._is_busy():
            self._last_busy = step
        elif step > WARM_UP_STEPS:
            self.undisturbed.append(step)
        noticed = self.notices.flags(self.commit_seconds)
        if step - self._last_busy < self.free_steps:
            return noticed
        self._last_busy = step
        self.commits_left -= 1
        return noticed | Flags(commit=self.commits_left >= 0, stop=self.commits_left < 0)

    def _is_busy(self) -> bool:
        threads = (self.committer._reserving, self._removing)
        return self.committer.is_busy or any(thread is not None and thread.is_alive() for thread in threads)


def make_first_task(root: Path, options: argparse.Namespace, world_size: int) -> WorkerTask:
    """What the ranks of a job's first generation are to do, with all that it needs in a folder."""
    directory = JobDirectory(root / "job")
    directory.root.mkdir()
    job = make_llama_job(root, options.size, options.batch, options.length, keep=1)
    layout, micro_batch = Layout(world_size, options.zero_stage), options.micro_batch or options.batch // world_size
    return make_task(directory, job, layout, start_generation(directory), micro_batch)


def cost(logs: GenerationLogs, undisturbed: Sequence[int]) -> dict[str, Any]:
    """What commits cost: seconds of the steps they touch above those of a median step that nothing disturbs."""
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
    """Kind of file system that a folder is on, such as ext4 or tmpfs."""
    command = ["stat", "--file-system", "--format", "%T", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Train; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=LLAMAS, default="1.1B", help="of the model")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="rows of a step, over all GPUs")
    parser.add_argument("--micro-batch", type=int, help="rows that go through the model at once; all by default")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--commits", type=int, default=11, help="the first one counts as the others do")
    parser.add_argument("--free-steps", type=int, default=20, help="between two commits")
    parser.add_argument("--folder", type=Path, help="where checkpoints go")
    parser.add_argument("--alone", action="store_true", help="remove each checkpoint before the next one")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    with torchrun_group() as (rank, world_size):
        root = Path(tempfile.mkdtemp(dir=options.folder)) if rank == 0 else None
        task = make_first_task(root, options, world_size) if root else None
        task = from_first_rank(task)
        directory = JobDirectory(Path(task.directory))
        logs = directory.generation_logs(task.generation)
        with Journal(logs, rank, hang_timeout_seconds=600) as journal:
            worker = CommittingWorker(
                task, rank, world_size, journal, options.commits, options.free_steps, options.alone
            )
            worker.train()
        if root:
            shapes = parameter_shapes(worker.engine).values()
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
