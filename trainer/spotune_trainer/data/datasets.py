"""Opens a job's datasets: the training shards with their sample schedule, and the evaluation samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spotune.errors import JobError
from spotune.job import EvalSpec, FinetuneJob, TrainingSpec
from spotune_trainer.data.batches import has_labels, has_pairs
from spotune_trainer.data.joined_shards import JoinedShards
from spotune_trainer.data.manifests import MANIFEST, check_agreement, check_label_names, parse_manifest, read_manifest
from spotune_trainer.data.mixture_schedule import MixtureSchedule
from spotune_trainer.data.sampling.mixture_plan import plan_mixture
from spotune_trainer.data.schedule import SampleIds, SampleSchedule, Schedule, held_out_ids
from spotune_trainer.data.shards import MAX_OPEN_SHARDS, MAX_PREFETCHED_SHARDS, ShardedDataset, read_stored_file
from spotune_trainer.files import cache_directory
from spotune_trainer.job_directory.layout import JobDirectory

_LEAST_OPEN_SHARDS = 8  # of a source of a mixture, so that a shuffle block fits
_LEAST_PREFETCHED_SHARDS = 2
_LABEL_COLUMNS = {"classification": "text_label", "tokenClassification": "token_labels"}
"""Column of the shards by the objective that learns from it."""


@dataclass(frozen=True)
class Datasets:
    """The open datasets of a job.

    Attributes:
        train: the training shards.
        schedule: which samples of `train` each step uses.
        evaluation: the evaluation shards; None if the job has no evaluation data. If a fraction of `train` is held out,
            the same object; of a mixture, the training shards followed by the evaluation shards.
        evaluation_ids: sample ids in `evaluation`, ascending.
        index_hashes: SHA-256 of each dataset's index, by its field such as `train` and `eval`; in a mixture by source.
        evaluation_by_source: sample ids in `evaluation` by source of a mixture; empty without a mixture.
    """

    train: ShardedDataset | JoinedShards
    schedule: Schedule
    evaluation: ShardedDataset | JoinedShards | None
    evaluation_ids: SampleIds
    index_hashes: dict[str, str]
    evaluation_by_source: Mapping[str, SampleIds] = field(default_factory=dict)


def train_source(job: FinetuneJob, directory: JobDirectory) -> str:
    """Location of the training shards: `dataset.train`, or in the job directory if `dataset.prepare` writes them."""
    dataset = job.spec.dataset
    if dataset.train is not None:
        return dataset.train.source
    return str(directory.prepared())


def mixture_sources(job: FinetuneJob, directory: JobDirectory) -> dict[str, str]:
    """Location of the training shards of each source of a mixture, by name."""
    return {
        source.name: source.train.source if source.train is not None else str(directory.prepared(source.name))
        for source in job.spec.dataset.mixture
    }


def check_local_manifests(job: FinetuneJob, directory: JobDirectory) -> None:
    """Check that the sources of a mixture that are folders were tokenized alike.

    Raises:
        JobError: two of them differ; the message names both.
    """
    sources = mixture_sources(job, directory)
    check_agreement({name: read_manifest(Path(source)) for name, source in sources.items() if "://" not in source})


def open_datasets(job: FinetuneJob, directory: JobDirectory) -> Datasets:
    """Open the job's training and evaluation datasets.

    Raises:
        JobError: a source is not an MDS dataset or does not fit the objective, no samples are left to train on, or a
            source of a mixture would be repeated more often than its `maxEpochs`.
        InfrastructureError: an index could not be downloaded.
    """
    try:
        return _open_mixture(job, directory) if job.spec.dataset.mixture else _open_dataset(job, directory)
    except ValueError as error:
        raise JobError(f"dataset: {error}") from error


def _open_dataset(job: FinetuneJob, directory: JobDirectory) -> Datasets:
    spec, training = job.spec.dataset, job.spec.training
    train = ShardedDataset(train_source(job, directory), cache_directory())
    _check_rows(train, job)
    hashes = {"train": train.index_hash}
    evaluation: ShardedDataset | None = None
    excluded = _held_out(train, spec.eval)
    ids: SampleIds = np.zeros(0, dtype=np.int64)
    if excluded is not None:
        evaluation, ids = train, excluded
    elif spec.eval is not None and spec.eval.source is not None:
        evaluation = ShardedDataset(spec.eval.source, cache_directory())
        _check_rows(evaluation, job)
        ids = np.arange(evaluation.num_samples, dtype=np.int64)
    if evaluation is not None:
        hashes["eval"] = evaluation.index_hash
    return Datasets(train, _schedule(train, training, excluded), evaluation, ids, hashes)


def _open_mixture(job: FinetuneJob, directory: JobDirectory) -> Datasets:
    spec, training = job.spec.dataset, job.spec.training
    hashes: dict[str, str] = {}

    def opened(name: str, role: str, source: str) -> ShardedDataset:
        dataset = _open_source(f"mixture.{name}.{role}", source, len(spec.mixture))
        _check_rows(dataset, job)
        hashes[f"mixture.{name}.{role}"] = dataset.index_hash
        return dataset

    trained = [opened(name, "train", source) for name, source in mixture_sources(job, directory).items()]
    separate = [
        (source.name, opened(source.name, "eval", source.eval.source))
        for source in spec.mixture
        if source.eval is not None and source.eval.source is not None
    ]
    train = JoinedShards(trained)
    evaluation = JoinedShards([*trained, *(dataset for _, dataset in separate)])
    by_source: dict[str, SampleIds] = {}
    orders = []
    for source, dataset, first_id in zip(spec.mixture, trained, train.first_ids, strict=True):
        excluded = _held_out(dataset, source.eval or spec.eval)
        if excluded is not None:
            by_source[source.name] = excluded + first_id
        orders.append(_schedule(dataset, training, excluded))
    for (name, dataset), first_id in zip(separate, evaluation.first_ids[len(trained) :], strict=True):
        by_source[name] = np.arange(dataset.num_samples, dtype=np.int64) + first_id
    schedule = MixtureSchedule(plan_mixture(job, [order.num_samples for order in orders]), orders, train.first_ids)
    ids = np.sort(np.concatenate(list(by_source.values()))) if by_source else np.zeros(0, dtype=np.int64)
    ordered = {source.name: by_source[source.name] for source in spec.mixture if source.name in by_source}
    return Datasets(train, schedule, evaluation if by_source else None, ids, hashes, ordered)


def _open_source(role: str, source: str, sharing: int) -> ShardedDataset:
    """Open a source of a mixture; all of them share the limits of open and prefetched shards."""
    try:
        return ShardedDataset(
            source,
            cache_directory(),
            max_open_shards=max(MAX_OPEN_SHARDS // sharing, _LEAST_OPEN_SHARDS),
            max_prefetched_shards=max(MAX_PREFETCHED_SHARDS // sharing, _LEAST_PREFETCHED_SHARDS),
        )
    except JobError as error:
        raise JobError(f"dataset.{role}: {error}") from error


def _schedule(dataset: ShardedDataset, training: TrainingSpec, excluded: SampleIds | None) -> SampleSchedule:
    return SampleSchedule(
        dataset.shard_sizes, training.global_batch_size, training.seed, training.shuffle_block_size, excluded
    )


def _held_out(dataset: ShardedDataset, evaluation: EvalSpec | None) -> SampleIds | None:
    """Ids of the samples that are held out for evaluation; None if none are."""
    if evaluation is None or evaluation.fraction is None:
        return None
    return held_out_ids(dataset.num_samples, evaluation.fraction, evaluation.seed)


def _check_rows(dataset: ShardedDataset, job: FinetuneJob) -> None:
    """Raise JobError if the objective of a job cannot learn from the rows of a dataset."""
    objective = job.spec.training.objective
    _check_labels(dataset, objective)
    _check_label_names(dataset.source, job.spec.dataset.labels)
    _check_exclusive(
        dataset,
        objective,
        only="embedding",
        column="text_lengths",
        rows="texts without an answer",
        learned="texts that are near to each other",
        fields="dataset.query and dataset.positive",
    )
    answers = "answers with a label"
    _check_exclusive(
        dataset, objective, only="kto", column="desirable", rows=answers, learned=answers, fields="dataset.label"
    )
    pairs = has_pairs(dataset.columns)
    if pairs and objective == "sft":
        raise JobError(
            f"training.objective: {dataset.source} has pairs of chosen and rejected answers, and sft would learn both: "
            "use dpo, orpo, simpo or reward, or shards of another row format"
        )
    if not pairs and objective not in ("sft", "kto", "embedding", *_LABEL_COLUMNS):
        raise JobError(
            f"dataset: {objective} learns from pairs, and {dataset.source} has none: write the shards with "
            "dataset.chosen and dataset.rejected"
        )
    if objective == "reward" and "packed_pair_lengths" in dataset.columns:
        raise JobError(
            f"dataset: {dataset.source} has packed pairs, and reward scores each answer in a row of its own: write the "
            "shards with packing: false"
        )


def _check_exclusive(
    dataset: ShardedDataset, objective: str, *, only: str, column: str, rows: str, learned: str, fields: str
) -> None:
    """Raise JobError if the one objective that learns from certain rows meets others, or another objective meets these.

    Args:
        dataset: the shards.
        objective: of the job.
        only: the objective that learns from these rows.
        column: that shards of these rows have.
        rows: what they are, for another objective.
        learned: what `only` learns from.
        fields: of the job, with which such shards are written.
    """
    has_rows = column in dataset.columns
    if has_rows and objective != only:
        raise JobError(
            f"training.objective: {dataset.source} has {rows}, which only {only} learns from: use {only}, or shards of "
            "another row format"
        )
    if not has_rows and objective == only:
        raise JobError(
            f"dataset: {only} learns from {learned}, and {dataset.source} has none: write the shards with {fields}"
        )


def _check_labels(dataset: ShardedDataset, objective: str) -> None:
    """Raise JobError if the objective learns labels and the rows have none, or the other way round."""
    needed = _LABEL_COLUMNS.get(objective)
    if needed is not None and needed not in dataset.columns:
        what = "labels of texts" if needed == "text_label" else "labels of words"
        raise JobError(
            f"dataset: {objective} learns {what}, and {dataset.source} has none: write the shards with dataset.text, "
            "dataset.label and dataset.labels"
        )
    if needed is None and has_labels(dataset.columns):
        fitting = next(name for name, column in _LABEL_COLUMNS.items() if column in dataset.columns)
        raise JobError(
            f"training.objective: {dataset.source} has labels, which {objective} does not learn: use {fitting}, or "
            "shards of another row format"
        )


def _check_label_names(source: str, labels: Sequence[str]) -> None:
    """Raise JobError if the manifest of shards has other labels than the job, or the same in another order."""
    if "://" not in source:
        check_label_names(read_manifest(Path(source)), source, labels)
        return
    folder = source.rstrip("/")
    for location in (folder, folder.rpartition("/")[0]):  # of one of two splits it is beside its folder
        content = read_stored_file(location, MANIFEST, cache_directory()) if labels else None
        if content is not None:
            check_label_names(parse_manifest(content, f"{location}/{MANIFEST}"), source, labels)
            return
