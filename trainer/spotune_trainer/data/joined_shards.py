"""The rows of several datasets as one, for a mixture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.files import content_key


class JoinedShards:
    """Random access to the samples of several datasets, with the interface of a `ShardedDataset`.

    Sample ids count through the datasets in their order. Thread-safe.

    Args:
        datasets: At least one.

    Attributes:
        source: Their locations, for messages.
        columns: MDS encoding of the columns that all of them have, by name.
        first_ids: Id of the first sample of each.
    """

    def __init__(self, datasets: Sequence[ShardedDataset]) -> None:
        self.datasets = tuple(datasets)
        self.source = " + ".join(dataset.source for dataset in datasets)
        self.columns = {
            name: encoding
            for name, encoding in datasets[0].columns.items()
            if all(name in dataset.columns for dataset in datasets)
        }
        self._stops = list(accumulate(dataset.num_samples for dataset in datasets))
        self.first_ids = [0, *self._stops[:-1]]

    @property
    def index_hash(self) -> str:
        """Hash of the indices of all datasets, in hex."""
        return content_key([dataset.index_hash for dataset in self.datasets])

    @property
    def num_samples(self) -> int:
        """Number of samples in all datasets."""
        return self._stops[-1]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        """One sample as a mapping from column to value.

        Raises:
            IndexError: The id is out of range.
            DataError: Its shard is missing or damaged. The message names the shard.
            InfrastructureError: Its shard could not be downloaded.
        """
        if not 0 <= sample_id < self.num_samples:
            raise IndexError(f"sample {sample_id} of {self.num_samples} in {self.source}")
        index = bisect_right(self._stops, sample_id)
        return self.datasets[index][sample_id - self.first_ids[index]]

    def prefetch(self, sample_ids: Sequence[int] | npt.NDArray[np.int64]) -> bool:
        """Start fetching the shards of these samples in the background.

        Returns:
            False if a dataset has reached its limit of prefetched shards: call again later with the same samples.
        """
        ids = np.asarray(sample_ids, dtype=np.int64)
        indices = np.searchsorted(self._stops, ids, side="right")
        started = [
            self.datasets[index].prefetch(ids[indices == index] - self.first_ids[index]) for index in np.unique(indices)
        ]
        return all(started)

    def close(self, *, wait: bool = True) -> None:
        """Stop fetching; wait for what is being fetched unless `wait` is false. Files in the cache stay."""
        for dataset in self.datasets:
            dataset.close(wait=wait)
