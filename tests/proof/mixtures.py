"""A job that trains on a mixture, and an independent walk through its samples.

The walk shares nothing with the trainer's schedule but MosaicML's shuffle: it goes through the stream sample by sample
and always takes the draw with the lowest time, as a fraction.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from streaming.base.shuffle import get_shuffle

from spotune.job import FinetuneJob
from spotune_trainer.data.batches import row_hash
from spotune_trainer.data.schedule import SHARDS_PER_SHUFFLE_BLOCK
from spotune_trainer.data.shards import ShardedDataset
from tests.trainer.support.runs import BATCH, Runs, write_shards

ROWS = {"sql": 40, "chat": 25, "late": 10}
"""Rows of each source, in shards of ten."""
SOURCES: tuple[dict[str, Any], ...] = (
    {"name": "sql", "weight": 5},
    {"name": "chat", "weight": 2.5, "untilStep": 13},
    {"name": "late", "weight": 1.5, "fromStep": 9},
)


def mixture_job(runs: Runs, steps: int, **sections: Any) -> FinetuneJob:
    """A job of `runs` that trains `steps` steps on three sources, with changes after 9 and 13 steps."""
    mixture = []
    for seed, source in enumerate(SOURCES):
        folder = runs.root / f"mixture-{source['name']}"
        if not folder.exists():
            write_shards(folder, "seq2seq", ROWS[source["name"]], seed)
        mixture.append({**source, "train": {"source": str(folder)}})
    training = {"epochs": None, "maxSteps": steps, **sections.pop("training", {})}
    return runs.job(dataset={"train": None, "mixture": mixture}, training=training, **sections)


def sample_hashes(job: FinetuneJob, cache: Path) -> dict[int, int]:
    """Hash over the rows of each step, which counts from 1, as the job's mixture asks for."""
    steps = job.spec.training.max_steps
    assert steps is not None
    datasets = [ShardedDataset(source.train.source, cache) for source in job.spec.dataset.mixture if source.train]
    first_ids = np.cumsum([0, *(dataset.num_samples for dataset in datasets)]).tolist()
    orders = [_endless_order(dataset, job.spec.training.seed) for dataset in datasets]
    hashes = {}
    for step, sources in enumerate(_sources_of_steps(job, sum(ROWS.values()), steps), start=1):
        total = 0
        for source in sources:
            sample_id = next(orders[source])
            total += row_hash(first_ids[source] + sample_id, datasets[source][sample_id])
        hashes[step] = total % (1 << 64)
    return hashes


def _sources_of_steps(job: FinetuneJob, epoch: int, steps: int) -> Iterator[list[int]]:
    """The source of each sample of each step. The clock of the draws restarts when the sources of a step change."""
    left_in_epoch = epoch
    used: list[int] = []
    draws: dict[int, int] = {}
    for step in range(steps):
        now = [
            number
            for number, source in enumerate(job.spec.dataset.mixture)
            if source.from_step <= step and (source.until_step == 0 or step < source.until_step)
        ]
        if now != used:
            used, draws = now, dict.fromkeys(now, 0)
        size = min(BATCH, left_in_epoch)
        left_in_epoch = left_in_epoch - size or epoch
        taken = []
        for _ in range(size):
            source = min(used, key=lambda number: (_time(job, number, draws[number]), number))
            draws[source] += 1
            taken.append(source)
        yield taken


def _time(job: FinetuneJob, source: int, draw: int) -> Fraction:
    weight = job.spec.dataset.mixture[source].weight
    return Fraction(2 * draw + 1, 2) / Fraction(str(weight))


def _endless_order(dataset: ShardedDataset, seed: int) -> Iterator[int]:
    """The sample ids of one source, epoch after epoch."""
    sizes = np.asarray(dataset.shard_sizes)
    block = SHARDS_PER_SHUFFLE_BLOCK * int(sizes.max())
    epoch = 0
    while True:
        yield from get_shuffle("py1e", sizes, 1, seed, epoch, block).tolist()
        epoch += 1
