"""Undisturbed reference runs, without Ray.

They train the same job with the same worker class: from the beginning at each world size, and from a checkpoint of a
faulted run, at the world size that resumed from it and at the previous one.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune.job_file.load import replace_fields
from spotune_trainer.checkpoint.generations import Generation, claim
from spotune_trainer.checkpoint.layout import MANIFEST, CheckpointName
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.export.huggingface import weights_sha256
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import Flags
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import RankExit, WorkerTask
from spotune_trainer.training.worker import Worker
from tests.proof.history import Record, read_generations, surviving
from tests.proof.mixtures import sample_hashes
from tests.trainer.support.groups import GroupFailedError, run_group
from tests.trainer.support.live import LiveRun
from tests.trainer.support.runs import STEPS_PER_EPOCH, Layout, Runs, epoch_hash, make_task, train_rank

_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Reference:
    """What was trained in one go.

    Attributes:
        directory: where; None where it has been removed again.
        records: its steps.
        checksums: of the files of the commit after its last step, by rank.
        export_sha256: of the exported weights; None where it did not train to the end.
    """

    directory: JobDirectory | None
    records: tuple[Record, ...]
    checksums: tuple[str, ...]
    export_sha256: str | None


class CommitEveryStepWorker(Worker):
    """Commits after every step, and waits for it."""

    def propose_flags(self, step: int) -> Flags:
        return Flags(commit=True)


class PartialRunWorker(Worker):
    """Trains some steps, commits and leaves.

    Attributes:
        count: how many.
    """

    count: int

    def run_steps(self) -> RankExit:
        with closing(self.batches()) as batches:
            for _ in self.loop.run(islice(batches, self.count), self.context.first_step, lambda _: Flags()):
                pass
        self.loop.log_pending_step()
        self.commit(self.context.first_step + self.count)
        self.checkpointing.finish_commit()
        return RankExit.YIELDED


def train_steps(
    rank: int, world_size: int, task: WorkerTask, count: int, kind: type[PartialRunWorker] = PartialRunWorker
) -> None:
    """One rank of a group that trains `count` steps."""
    logs = JobDirectory(Path(task.directory)).generation_logs(task.generation)
    with ProgressReporter(logs, rank, hang_timeout_seconds=_TIMEOUT_SECONDS) as reporter:
        worker = kind(task, rank, world_size, reporter)
        worker.count = count
        worker.train()


@dataclass
class References:
    """Makes reference runs of one job; each once, also if several threads ask for it.

    Attributes:
        job: its `workers` and `execution` do not matter.
        plan: values that the plan of the disturbed runs has, and the usual plan of a test has not.
    """

    runs: Runs
    job: FinetuneJob
    plan: Mapping[str, Any] = field(default_factory=dict)
    _made: dict[tuple[Any, ...], Reference] = field(default_factory=dict)
    _locks: dict[tuple[Any, ...], threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def undisturbed(self, layout: Layout) -> Reference:
        """From the beginning to the end, with a commit after every step."""
        with self._locked(("undisturbed", layout)) as key:
            if key not in self._made:
                directory = self._new("undisturbed")
                task = self._task(directory, layout, claim(directory, None))
                ended = run_group(layout.world_size, train_rank, task, CommitEveryStepWorker, timeout=_TIMEOUT_SECONDS)
                self._made[key] = _reference(directory, task.generation, ended[0].summary["exportSha256"])
            return self._made[key]

    def from_checkpoint(self, path: Path, layout: Layout, steps: int | None) -> Reference:
        """From a checkpoint on.

        Args:
            path: folder of the checkpoint; it is copied.
            layout: world size and ZeRO stage to go on with.
            steps: how many; None: to the end and the export.
        """
        name = CheckpointName.parse(path.name)
        with self._locked((name, checksums(path), layout, steps)) as key:
            if key not in self._made:
                directory = self._new("part")
                shutil.copytree(path, directory.checkpoints / path.name)
                copy_reference(path.parent.parent, directory)
                task = self._task(directory, layout, _claim_after(directory, name))
                if steps is None:
                    ended = run_group(layout.world_size, train_rank, task, timeout=_TIMEOUT_SECONDS)
                    sha256 = ended[0].summary["exportSha256"]
                else:
                    run_group(layout.world_size, train_steps, task, steps, timeout=_TIMEOUT_SECONDS)
                    sha256 = None
                made = _reference(directory, task.generation, sha256)
                shutil.rmtree(directory.root)
                self._made[key] = Reference(None, made.records, made.checksums, sha256)
            return self._made[key]

    def epoch_hash(self) -> int | None:
        """Hash over all rows of the job's data, each once, read beside the trainer; None for a mixture."""
        train = self.job.spec.dataset.train
        return None if train is None else epoch_hash(Path(train.source), self.runs.root / "cache")

    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch of the job's data; of a mixture those of its schedule of steps."""
        train = self.job.spec.dataset.train
        if train is None:
            return STEPS_PER_EPOCH
        samples = ShardedDataset(train.source, self.runs.root / "cache").num_samples
        return -(-samples // self.job.spec.training.global_batch_size)

    def mixture_hashes(self) -> dict[int, int]:
        """Hash over the rows of each step of a mixture, found beside the trainer; empty without a mixture."""
        return sample_hashes(self.job, self.runs.root / "cache") if self.job.spec.dataset.mixture else {}

    def _task(self, directory: JobDirectory, layout: Layout, generation: Generation) -> WorkerTask:
        task = make_task(directory, self.job, layout, generation)
        return replace(task, plan={**task.plan, **self.plan})

    def _new(self, name: str) -> JobDirectory:
        with self._lock:
            return self.runs.empty(name)

    def _locked(self, key: tuple[Any, ...]) -> _LockedKey:
        with self._lock:
            return _LockedKey(key, self._locks.setdefault(key, threading.Lock()))


class ProductReferences(References):
    """Makes the undisturbed runs with the whole product: the usual reference worker trains on CPUs only."""

    def undisturbed(self, layout: Layout) -> Reference:
        """A run without kills, as a user starts it; its commits are those of the job."""
        with self._locked(("undisturbed", layout)) as key:
            if key not in self._made:
                values = {"workers.count": layout.world_size, "workers.min": layout.world_size}
                values["execution.zeroStage"] = layout.zero_stage
                job = replace_fields(self.job, {f"spec.{name}": value for name, value in values.items()})
                run = LiveRun(self._new("undisturbed"), job, patience_seconds=_TIMEOUT_SECONDS)
                run.start()
                try:
                    code, output = run.wait()
                finally:
                    run.clean_up()
                if code != 0:
                    raise GroupFailedError(f"an undisturbed run exited with {code}: {output[-2000:]}")
                records = tuple(surviving(read_generations(run.directory)))
                exported = weights_sha256(run.directory.export)
                self._made[key] = Reference(run.directory, records, (), exported)
            return self._made[key]


@dataclass(frozen=True)
class _LockedKey:
    """A context manager that holds the lock of one reference run."""

    key: tuple[Any, ...]
    lock: threading.Lock

    def __enter__(self) -> tuple[Any, ...]:
        self.lock.acquire()
        return self.key

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def copy_reference(root: Path, directory: JobDirectory) -> None:
    """Copy the reference model's log-probabilities, which a run computes before its first step, if there are any."""
    made = JobDirectory(root).reference
    if made.exists():
        shutil.copytree(made, directory.reference)


def checksums(checkpoint: Path) -> tuple[str, ...]:
    """Of the files of a checkpoint, by rank, as its manifest says."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    return tuple(entry["xxh3"] for entry in manifest["files"])


def _claim_after(directory: JobDirectory, name: CheckpointName) -> Generation:
    """Claim a generation that may have started from a checkpoint: a later one than made it."""
    for _ in range(name.generation):
        claim(directory, None)
    return claim(directory, name)


def _reference(directory: JobDirectory, generation: int, export_sha256: str | None) -> Reference:
    records: Sequence[Record] = read_generations(directory)[-1].steps
    last = directory.checkpoints / str(CheckpointName(records[-1]["step"], generation))
    return Reference(directory, tuple(records), checksums(last), export_sha256)
