"""Which samples every step trains on: a pure function of the shard sizes, the seed and the step.

Nothing here knows ranks, workers or attempts, so any worker group that starts at step ``s`` trains on exactly what
every other one would have trained on. The shuffle is MosaicML's ``py1e``: samples move within a block of a few
shards, so a step touches few shards and those of the next steps can be fetched ahead.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SampleIds = npt.NDArray[np.int64]

SHARDS_PER_SHUFFLE_BLOCK = 4
_ORDERS_KEPT = 2  # the current epoch, and the next one when the loader reads ahead across the boundary


class SampleSchedule:
    """The fixed order of samples of a training run, cut into steps.

    Every sample that is not excluded is used exactly once per epoch. An epoch has ``ceil(samples / batch)`` steps; its
    last step may hold fewer samples.

    Args:
        shard_sizes: Samples per shard, in the order of the dataset's index.
        global_batch_size: Samples per step over all workers.
        seed: Of the shuffle; each epoch has an order of its own.
        shuffle_block_size: Samples within which the order is shuffled; 0 means about four shards. Values below the
            size of the largest shard are raised to it, because ``py1e`` cannot shuffle less than a shard.
        excluded: Sample ids that are never trained on (held out for evaluation).

    Raises:
        ValueError: There is nothing to train on, or the batch size is not positive.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        global_batch_size: int,
        seed: int,
        shuffle_block_size: int = 0,
        excluded: SampleIds | None = None,
    ) -> None:
        if global_batch_size < 1:
            raise ValueError(f"the global batch size must be at least 1, not {global_batch_size}")
        self._shard_sizes = np.asarray([size for size in shard_sizes if size > 0], dtype=np.int64)
        total = int(self._shard_sizes.sum())
        self._excluded = _excluded_mask(total, excluded)
        self.num_samples = total - (0 if self._excluded is None else int(self._excluded.sum()))
        if self.num_samples < 1:
            raise ValueError("the dataset has no samples to train on")
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle_block_size = _block_size(self._shard_sizes, shuffle_block_size)
        self._orders: OrderedDict[int, SampleIds] = OrderedDict()

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every sample is used once: ``ceil(num_samples / global_batch_size)``."""
        return math.ceil(self.num_samples / self.global_batch_size)

    def total_steps(self, epochs: int | None, max_steps: int | None) -> int:
        """Steps of a whole run: ``epochs`` full epochs, at most ``max_steps``; one of the two must be given."""
        bounds = [] if epochs is None else [epochs * self.steps_per_epoch]
        bounds += [] if max_steps is None else [max_steps]
        return min(bounds)

    def epoch_of(self, step: int) -> int:
        """The 0-based epoch that the 0-based global step belongs to."""
        return step // self.steps_per_epoch

    def sample_ids(self, step: int) -> SampleIds:
        """Sample ids of a 0-based global step, in order: ``[samples in the step]``."""
        if step < 0:
            raise ValueError(f"steps count from 0, not {step}")
        order = self.order(self.epoch_of(step))
        begin = (step % self.steps_per_epoch) * self.global_batch_size
        return order[begin : begin + self.global_batch_size]

    def order(self, epoch: int) -> SampleIds:
        """All sample ids of an epoch in the order in which they are used: ``[num_samples]``, read-only."""
        order = self._orders.get(epoch)
        if order is None:
            order = self._shuffle(epoch)
            self._orders[epoch] = order
            while len(self._orders) > _ORDERS_KEPT:
                self._orders.popitem(last=False)
        return order

    def _shuffle(self, epoch: int) -> SampleIds:
        # Imported on use: `streaming` pulls in seconds of cloud clients that counting steps does not need.
        from streaming.base.shuffle import get_shuffle

        order: SampleIds = get_shuffle("py1e", self._shard_sizes, 1, self.seed, epoch, self.shuffle_block_size)
        if self._excluded is not None:
            order = order[~self._excluded[order]]
        order.flags.writeable = False
        return order


def micro_batches(sample_ids: SampleIds, micro_batch_size: int) -> list[SampleIds]:
    """Cut the samples of a step into micro-batches; the last one may be smaller.

    Micro-batch ``g`` of the result belongs to rank ``g mod world size``.
    """
    return [sample_ids[begin : begin + micro_batch_size] for begin in range(0, len(sample_ids), micro_batch_size)]


def held_out(num_samples: int, fraction: float, seed: int) -> SampleIds:
    """Sample ids held out for evaluation, ascending: ``round(fraction * num_samples)``, but at least one.

    Ids are ranked by a hash of (seed, id), so the choice is the same on every machine and with every version of NumPy.

    Raises:
        ValueError: The fraction leaves nothing to train on or nothing to evaluate.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"the held-out fraction must lie between 0 and 1, not {fraction}")
    count = max(1, round(fraction * num_samples))
    if count >= num_samples:
        raise ValueError(f"holding out {fraction} of {num_samples} samples leaves nothing to train on")
    ids = np.arange(num_samples, dtype=np.uint64)
    ranked = np.argsort(_mix(ids + _mix(np.asarray([seed], dtype=np.uint64))), kind="stable")
    return np.sort(ranked[:count]).astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatter 64-bit integers (SplitMix64; Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _excluded_mask(num_samples: int, excluded: SampleIds | None) -> npt.NDArray[np.bool_] | None:
    if excluded is None or len(excluded) == 0:
        return None
    mask = np.zeros(num_samples, dtype=np.bool_)
    mask[excluded] = True
    return mask


def _block_size(shard_sizes: npt.NDArray[np.int64], wanted: int) -> int:
    largest = int(shard_sizes.max(initial=1))
    # py1e draws each block between 0.75 and 1.25 of this; a draw below the shard's size would not shuffle that shard.
    smallest = math.ceil(largest / 0.75) + 1
    return max(wanted or SHARDS_PER_SHUFFLE_BLOCK * largest, smallest)
