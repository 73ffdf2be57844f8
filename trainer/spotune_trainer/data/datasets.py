"""The data sets of a job, opened: training shards with their schedule, and what the model is evaluated on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.data.schedule import SampleIds, SampleSchedule, held_out
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.job_directory.layout import JobDirectory


@dataclass(frozen=True)
class Datasets:
    """Open data sets of one worker.

    Attributes:
        train: shards that are trained on.
        schedule: which of their samples each step trains on.
        evaluation: shards that the model is evaluated on, `train` itself where a fraction of it is held out; None
            where the job evaluates nothing.
        evaluation_ids: the samples of `evaluation`, in order.
    """

    train: ShardedDataset
    schedule: SampleSchedule
    evaluation: ShardedDataset | None
    evaluation_ids: SampleIds

    def hashes(self) -> dict[str, str]:
        """Hash of each index by its role."""
        found = {"train": self.train.index_hash}
        if self.evaluation is not None:
            found["eval"] = self.evaluation.index_hash
        return found


def train_source(job: FinetuneJob, directory: JobDirectory) -> str:
    """Where the training shards are: `dataset.train`, or what `dataset.prepare` made in the job's folder."""
    dataset = job.spec.dataset
    if dataset.train is not None:
        return dataset.train.source
    return str(directory.data / "train")


def cache_directory() -> Path:
    """Node-local folder of downloaded shards, shared by the workers of a node and by later attempts."""
    return Path(os.environ.get("SPOTUNE_CACHE") or Path.home() / ".cache" / "spotune")


def open_datasets(job: FinetuneJob, directory: JobDirectory) -> Datasets:
    """Open what the job trains and evaluates on.

    Raises:
        JobError: a source is no set of shards, or nothing is left to train on.
        InfrastructureError: an index could not be downloaded.
    """
    spec, training = job.spec.dataset, job.spec.training
    train = ShardedDataset(train_source(job, directory), cache_directory())
    evaluation: ShardedDataset | None = None
    excluded: SampleIds | None = None
    ids: SampleIds = np.zeros(0, dtype=np.int64)
    try:
        if spec.eval is not None and spec.eval.fraction is not None:
            excluded = held_out(train.num_samples, spec.eval.fraction, spec.eval.seed)
            evaluation, ids = train, excluded
        elif spec.eval is not None and spec.eval.source is not None:
            evaluation = ShardedDataset(spec.eval.source, cache_directory())
            ids = np.arange(evaluation.num_samples, dtype=np.int64)
        schedule = SampleSchedule(
            train.shard_sizes, training.global_batch_size, training.seed, training.shuffle_block_size, excluded
        )
    except ValueError as error:
        raise JobError(f"dataset: {error}") from error
    return Datasets(train, schedule, evaluation, ids)
