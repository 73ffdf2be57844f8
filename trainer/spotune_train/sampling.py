"""The samples of each step: a pure function of the step, so training resumes at the exact next sample."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import distributed

from spotune_train.progress import session_or_none
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.data.shards import ShardedDataset


class IndexedDataset(Protocol):
    """Anything with a length and samples by index, such as a map-style dataset of PyTorch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Samples:
    """This worker's part of the samples of each step, from the step after the checkpoint on. See `samples`."""

    def __init__(
        self, dataset: str | Path | IndexedDataset, batch_size: int, *, seed: int = 0, epochs: int | None = None
    ) -> None:
        cache = Path(tempfile.gettempdir()) / "spotune-shards"
        self.dataset: IndexedDataset = (
            ShardedDataset(str(dataset), cache) if isinstance(dataset, str | Path) else dataset
        )
        sizes = self.dataset.shard_sizes if isinstance(self.dataset, ShardedDataset) else [len(self.dataset)]
        self._schedule = SampleSchedule(sizes, batch_size, seed)
        self._epochs = epochs

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch; the last one may have fewer samples."""
        return self._schedule.steps_per_epoch

    @property
    def total_steps(self) -> int | None:
        """Number of steps of all epochs; None: there is no end."""
        return self._epochs * self.steps_per_epoch if self._epochs is not None else None

    def sample_ids(self, step: int) -> list[int]:
        """Indices of the samples of all workers in a step, which counts from 1."""
        return [int(sample) for sample in self._schedule.sample_ids(step - 1)]

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        session = session_or_none()
        step = session.step if session is not None else 0
        rank, world_size = (session.ranks.rank, session.ranks.world_size) if session is not None else _place()
        while self.total_steps is None or step < self.total_steps:
            step += 1
            mine = self.sample_ids(step)[rank::world_size]
            if isinstance(self.dataset, ShardedDataset) and step != self.total_steps:
                self.dataset.prefetch(self.sample_ids(step + 1)[rank::world_size])
            yield step, [self.dataset[sample] for sample in mine]


def samples(
    dataset: str | Path | IndexedDataset, batch_size: int, *, seed: int = 0, epochs: int | None = None
) -> Samples:
    """The samples of each step: iterate over (step, samples of this worker).

    The order is shuffled anew in each epoch, and depends on the dataset, `batch_size` and `seed` alone. So the samples
    of a step are the same after a loss of workers and with another number of them. Iteration begins at the step after
    the checkpoint, so call `report` or `checkpoint.save` with the step that belongs to the samples.

    Args:
        dataset: folder or URL of MDS shards, or a dataset with a length and samples by index.
        batch_size: samples of a step over all workers. Worker r of n gets the samples r, r + n, r + 2n ... of them. At
            the end of an epoch there may be fewer than workers; then some get none.
        seed: of the order.
        epochs: number of passes over the dataset; None: no end.

    Raises:
        ValueError: the batch size is not positive.
        JobError: the folder or URL has no MDS shards.
    """
    return Samples(dataset, batch_size, seed=seed, epochs=epochs)


def _place() -> tuple[int, int]:
    """Rank and number of processes outside of a job, as in a test on one machine."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
