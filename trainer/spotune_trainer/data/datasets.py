"""Opens a job's datasets: the training shards with their sample schedule, and the evaluation samples."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.data.schedule import SampleIds, SampleSchedule, held_out_ids
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.job_directory.layout import JobDirectory


@dataclass(frozen=True)
class Datasets:
    """The open datasets of a job.

    Attributes:
        train: the training shards.
        schedule: which samples of `train` each step uses.
        evaluation: the evaluation shards; the same object as `train` if a fraction of it is held out, None if the job
            has no evaluation data.
        evaluation_ids: sample ids in `evaluation`, ascending.
    """

    train: ShardedDataset
    schedule: SampleSchedule
    evaluation: ShardedDataset | None
    evaluation_ids: SampleIds

    def index_hashes(self) -> dict[str, str]:
        """SHA-256 of each dataset's index, with keys `train` and, if there is one, `eval`."""
        hashes = {"train": self.train.index_hash}
        if self.evaluation is not None:
            hashes["eval"] = self.evaluation.index_hash
        return hashes


def train_source(job: FinetuneJob, directory: JobDirectory) -> str:
    """Location of the training shards: `dataset.train`, or in the job directory if `dataset.prepare` writes them."""
    dataset = job.spec.dataset
    if dataset.train is not None:
        return dataset.train.source
    return str(directory.data / "train")


def cache_directory() -> Path:
    """Node-local folder for downloaded shards, shared by all ranks of a node and by later attempts.

    `$SPOTUNE_CACHE`, or else `~/.cache/spotune`.
    """
    return Path(os.environ.get("SPOTUNE_CACHE") or Path.home() / ".cache" / "spotune")


def open_datasets(job: FinetuneJob, directory: JobDirectory) -> Datasets:
    """Open the job's training and evaluation datasets.

    Raises:
        JobError: a source is not an MDS dataset or does not fit the objective, or no samples are left to train on.
        InfrastructureError: an index could not be downloaded.
    """
    spec, training = job.spec.dataset, job.spec.training
    train = ShardedDataset(train_source(job, directory), cache_directory())
    _check_rows(train, training.objective)
    evaluation: ShardedDataset | None = None
    excluded: SampleIds | None = None
    ids: SampleIds = np.zeros(0, dtype=np.int64)
    try:
        if spec.eval is not None and spec.eval.fraction is not None:
            excluded = held_out_ids(train.num_samples, spec.eval.fraction, spec.eval.seed)
            evaluation, ids = train, excluded
        elif spec.eval is not None and spec.eval.source is not None:
            evaluation = ShardedDataset(spec.eval.source, cache_directory())
            _check_rows(evaluation, training.objective)
            ids = np.arange(evaluation.num_samples, dtype=np.int64)
        schedule = SampleSchedule(
            train.shard_sizes, training.global_batch_size, training.seed, training.shuffle_block_size, excluded
        )
    except ValueError as error:
        raise JobError(f"dataset: {error}") from error
    return Datasets(train, schedule, evaluation, ids)


def _check_rows(dataset: ShardedDataset, objective: str) -> None:
    """Raise JobError if an objective cannot learn from the rows of a dataset."""
    has_pairs = "pair_lengths" in dataset.columns
    if has_pairs and objective == "sft":
        raise JobError(
            f"training.objective: {dataset.source} has pairs of chosen and rejected answers, and sft would learn both: "
            "use dpo, orpo or simpo, or shards of another row format"
        )
    if not has_pairs and objective != "sft":
        raise JobError(
            f"dataset: {objective} learns from pairs, and {dataset.source} has none: write the shards with "
            "dataset.chosen and dataset.rejected"
        )
