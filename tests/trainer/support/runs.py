"""Worker groups of small jobs without Ray: real ranks, shards with rows of uneven lengths, real checkpoints.

A run is two epochs of five steps, with commits after steps 5 and 10. The last step of an epoch holds 11 samples instead
of 16. No world size above 2 divides the number of micro-batches of every step.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from streaming.base.format.mds import MDSWriter

from spotune.job import ExecutionSpec, FinetuneJob
from spotune.plan.devices import machine_memory_bytes
from spotune_trainer.checkpoint.generations import Generation, choose_checkpoint, claim, surviving_steps
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, open_checkpoint
from spotune_trainer.checkpoint.memory.node_memory import NodeMemory, RankMemory
from spotune_trainer.data.batches import row_hash
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import WorkerTask
from spotune_trainer.training.worker import TrainResult, Worker, run_worker
from tests.trainer.support.groups import run_group
from tests.trainer.support.tiny import VOCABULARY, make_job, save_source

SAMPLES = 75
BATCH = 16
MICRO_BATCH = 3
STEPS_PER_EPOCH = 5
STEPS = 2 * STEPS_PER_EPOCH
NO_DROPOUT: Mapping[str, Mapping[str, float]] = {
    "seq2seq": {"dropout_rate": 0.0},
    "causal": {"attention_dropout": 0.0},
}
DROPOUT: Mapping[str, Mapping[str, float]] = {"seq2seq": {"dropout_rate": 0.1}, "causal": {"attention_dropout": 0.1}}


@dataclass(frozen=True)
class Layout:
    """Number of ranks, and their ZeRO stage."""

    world_size: int
    zero_stage: int


def at_all_layouts(*values: Any, quick: Sequence[Layout] = ()) -> list[Any]:
    """Parameters of a test: `values` at each ZeRO stage on one and on two ranks; `long` but for the `quick` layouts."""
    layouts = [Layout(world_size, zero_stage) for world_size in (1, 2) for zero_stage in range(4)]
    return [pytest.param(*values, layout, marks=() if layout in quick else (pytest.mark.long,)) for layout in layouts]


@dataclass
class Runs:
    """Jobs over one corpus within `root`; each finished run is trained once, at its first use."""

    root: Path
    _finished: dict[tuple[Any, ...], tuple[JobDirectory, TrainResult]] = field(default_factory=dict)

    def job(self, task: str = "seq2seq", dtype: str = "float32", dropout: bool = True, **sections: Any) -> FinetuneJob:
        """A job of two epochs with a commit every five steps; `sections` override its values."""
        values = (DROPOUT if dropout else NO_DROPOUT)[task]
        source = self.root / f"{task}-{'dropout' if dropout else 'plain'}"
        if not source.exists():
            save_source(source, task, **values)
        training = {
            "epochs": 2,
            "globalBatchSize": BATCH,
            "learningRate": 1e-3,
            "warmupSteps": 3,
            "weightDecay": 0.01,
            "seed": 7,
        }
        model = {"dtype": dtype, **sections.pop("model", {})}
        dataset = {"train": {"source": str(self.shards(task))}, "eval": None, **sections.pop("dataset", {})}
        training |= sections.pop("training", {})
        checkpoint = {"every": 5, "keep": 3, **sections.pop("checkpoint", {})}
        return make_job(
            source, task, model=model, dataset=dataset, training=training, checkpoint=checkpoint, **sections
        )

    def shards(self, task: str) -> Path:
        """The rows of a task as MDS shards of ten rows."""
        folder = self.root / f"{task}-shards"
        if not folder.exists():
            write_shards(folder, task)
        return folder

    def finished(self, layout: Layout, task: str = "seq2seq", dtype: str = "float32") -> JobDirectory:
        """An undisturbed finished run. Tests must not change it; `interrupted` makes a copy."""
        return self._finish(layout, task, dtype)[0]

    def summary(self, layout: Layout) -> dict[str, Any]:
        """The summary of rank 0 of a finished run."""
        return self._finish(layout, "seq2seq", "float32")[1].summary

    def interrupted(self, run: JobDirectory, step: int) -> JobDirectory:
        """A copy of a finished run as it was before its commits after `step`."""
        directory = self.empty(run.root.name.replace("finished", "interrupted"))
        shutil.copytree(run.root, directory.root, dirs_exist_ok=True)
        for path in directory.checkpoints.iterdir():
            if CheckpointName.parse(path.name).step > step:
                shutil.rmtree(path)
        return directory

    def with_and_without_loss(
        self, job: FinetuneJob, layout: Layout, micro_batch_size: int = MICRO_BATCH, timeout: float = 240.0
    ) -> tuple[JobDirectory, JobDirectory]:
        """A run that was interrupted after its first commit and resumed, and an undisturbed run."""
        undisturbed = self.empty("finished-undisturbed")
        train_generation(undisturbed, job, layout, micro_batch_size=micro_batch_size, timeout=timeout)
        resumed = self.interrupted(undisturbed, step=STEPS_PER_EPOCH)
        train_generation(resumed, job, layout, micro_batch_size=micro_batch_size, timeout=timeout)
        return resumed, undisturbed

    def empty(self, name: str) -> JobDirectory:
        """A new, empty folder for a job."""
        for number in itertools.count():
            directory = JobDirectory(self.root / f"{name}.{number}")
            with suppress(FileExistsError):
                directory.root.mkdir()
                return directory
        raise AssertionError("unreachable: there are always further numbers")

    def _finish(self, layout: Layout, task: str, dtype: str) -> tuple[JobDirectory, TrainResult]:
        key = (layout, task, dtype)
        if key not in self._finished:
            directory = self.empty(f"finished-{task}-{dtype}-{layout.world_size}-{layout.zero_stage}")
            self._finished[key] = directory, train_generation(directory, self.job(task, dtype), layout)
        return self._finished[key]


def write_shards(folder: Path, task: str, samples: int = SAMPLES, seed: int = 11) -> None:
    """Write rows of 2 to about 80 random tokens, with 1 label in the shortest row and 30 in the longest."""
    random = np.random.default_rng(seed)
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh3_64"], size_limit=None) as writer:
        for number in range(1, samples + 1):
            prompt = random.integers(3, VOCABULARY, 1 + int(50 * random.random() ** 3), dtype=np.int32)
            answer = random.integers(3, VOCABULARY, 1 + int(30 * random.random() ** 3), dtype=np.int32)
            if task == "causal":
                masked = np.full_like(prompt, -100)
                writer.write({"input_ids": np.append(prompt, answer), "labels": np.append(masked, answer)})
            else:
                writer.write({"input_ids": prompt, "labels": answer})
            if number % 10 == 0:
                writer.flush_shard()
                writer._reset_cache()


def make_plan(layout: Layout, micro_batch_size: int = MICRO_BATCH, execution: ExecutionSpec | None = None) -> RunPlan:
    """A plan without planning: each `auto` is off.

    Where layers are compiled, stage 3 has whole gradients, and one layer stays gathered. Where they are also
    recomputed, the last one is not.
    """
    compiled = execution is not None and execution.compile is True
    recompute = execution is not None and execution.gradient_checkpointing is True
    return RunPlan(
        version=1,
        fingerprint="0123",
        zero_stage=layout.zero_stage,
        micro_batch_size=micro_batch_size,
        gradient_checkpointing=recompute,
        kept_layers=int(compiled and recompute),
        offload_activations=execution is not None and execution.offload_activations is True,
        compile=compiled,
        reason="",
        data={},
        gathered_layers=int(compiled and layout.zero_stage == 3),
        whole_gradients=compiled and layout.zero_stage == 3,
    )


def make_task(
    directory: JobDirectory,
    job: FinetuneJob,
    layout: Layout,
    generation: Generation,
    micro_batch_size: int = MICRO_BATCH,
) -> WorkerTask:
    """The task that the driver would send to the ranks of `generation`."""
    return WorkerTask(
        directory=str(directory.root),
        generation=generation.number,
        restore=str(generation.restored) if generation.restored else None,
        job=job.model_dump(mode="json"),
        plan=make_plan(layout, micro_batch_size, job.spec.execution).to_json(),
    )


def start_generation(directory: JobDirectory) -> Generation:
    """Claim the next generation, which resumes from the newest valid checkpoint."""
    checkpoint = choose_checkpoint(directory).checkpoint
    return claim(directory, checkpoint.name if checkpoint else None)


def train_generation(
    directory: JobDirectory,
    job: FinetuneJob,
    layout: Layout,
    worker: type[Worker] | None = None,
    micro_batch_size: int = MICRO_BATCH,
    timeout: float = 240.0,
    memory: NodeMemory | None = None,
) -> TrainResult:
    """Run the next generation to its end; returns the result of rank 0.

    With `memory`, all ranks are on one node and keep two commits each in its shared memory.
    """
    task = make_task(directory, job, layout, start_generation(directory), micro_batch_size)
    memories = memory.share(layout.world_size, 2, task.restore) if memory else [None] * layout.world_size
    for each in memories:
        if each is not None:
            each.free_bytes = machine_memory_bytes  # whatever else runs on the machine
    result: TrainResult = run_group(layout.world_size, train_rank, task, worker, memories, timeout=timeout)[0]
    return result


def train_rank(
    rank: int,
    world_size: int,
    task: WorkerTask,
    worker: type[Worker] | None = None,
    memories: Sequence[RankMemory | None] = (),
) -> TrainResult:
    """Run one rank, with another worker class if one is given."""
    if worker is None:
        return run_worker(task, rank, world_size, memories[rank] if memories else None)
    logs = JobDirectory(Path(task.directory)).generation_logs(task.generation)
    with ProgressReporter(logs, rank, hang_timeout_seconds=600) as reporter:
        return worker(task, rank, world_size, reporter).train()


def rank_error(rank: int, world_size: int, task: WorkerTask) -> str:
    """Class and message of the exception of a rank; empty if it raises none."""
    try:
        run_worker(task, rank, world_size)
    except Exception as error:  # noqa: BLE001 - the test checks which exception it is
        return f"{type(error).__name__}: {error}"
    return ""


def resumed_at_another_layout(
    runs: Runs, job: FinetuneJob, before: Layout, after: Layout, step: int
) -> tuple[JobDirectory, JobDirectory]:
    """A run that was interrupted after its commit of `step` and resumed at another layout, and an undisturbed run."""
    undisturbed = runs.empty("finished-at-one-layout")
    train_generation(undisturbed, job, before)
    resumed = runs.interrupted(undisturbed, step)
    train_generation(resumed, job, after)
    return resumed, undisturbed


def losses(run: JobDirectory) -> list[float]:
    """Loss of every step of the surviving history."""
    return [float(record["loss"]) for record in surviving_steps(run)]


def sample_hashes(run: JobDirectory) -> list[str]:
    """`samples` of every step of the surviving history."""
    return [str(record["samples"]) for record in surviving_steps(run)]


def epoch_hash(shards: Path, cache: Path) -> int:
    """Hash of all rows, each once, read without the trainer's schedule."""
    dataset = ShardedDataset(str(shards), cache)
    return sum(row_hash(number, dataset[number]) for number in range(dataset.num_samples)) % (1 << 64)


def each_sample_once_per_epoch(records: Sequence[Mapping[str, Any]], expected: int) -> bool:
    """Whether the steps of each epoch have used each row exactly once."""
    hashes = [int(record["samples"], 16) for record in records]
    epochs = [hashes[begin : begin + STEPS_PER_EPOCH] for begin in range(0, len(hashes), STEPS_PER_EPOCH)]
    return all(sum(epoch) % (1 << 64) == expected for epoch in epochs)


def once_per_epoch(runs: Runs, directory: JobDirectory) -> bool:
    """Whether the surviving history has two epochs, each with every row exactly once."""
    records = surviving_steps(directory)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return each_sample_once_per_epoch(records, epoch_hash(runs.shards("seq2seq"), runs.root / "cache"))


def committed_state(run: JobDirectory, step: int) -> dict[str, torch.Tensor]:
    """All states of all parameters in the newest checkpoint of `step`, whole and flat, by "parameter/state"."""
    checkpoint = committed(run, step)
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for entry in checkpoint.manifest.files:
        for name, tensor in load_file(checkpoint.path / entry.name).items():
            parameter, offset, state = name.rsplit("|", 2)
            pieces.setdefault(f"{parameter}/{state}", {})[int(offset)] = tensor
    return {name: torch.cat([of[offset] for offset in sorted(of)]) for name, of in pieces.items()}


def committed(run: JobDirectory, step: int) -> Checkpoint:
    """The newest checkpoint of `step`."""
    paths = sorted(run.checkpoints.glob(f"step-{step:08d}.*"), key=lambda path: CheckpointName.parse(path.name))
    checkpoint = open_checkpoint(paths[-1])
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint
