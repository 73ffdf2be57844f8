"""The sample schedule: which samples each step trains on, as a pure function.

With ``B`` the global batch size and ``N`` the number of training samples, an epoch has ``S = ceil(N / B)`` steps, and

    order(epoch) = py1e(shard_sizes, seed, epoch, shuffle_block_size), without the excluded samples
    samples(step) = order(step // S)[(step % S) * B : (step % S + 1) * B]

Ranks, world size and attempts are no inputs. So a worker group of any size that resumes at step ``k`` trains on the
same samples as an uninterrupted run. Micro-batch ``g`` of a step goes to rank ``g mod world_size``.

``py1e`` is MosaicML streaming's shuffle: a sample moves only within a block of a few shards. A step therefore reads few
shards, and the shards of the next steps can be prefetched.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spotune_trainer.data.sampling.steps import EpochSteps, held_out_count

SampleIds = npt.NDArray[np.int64]

SHARDS_PER_SHUFFLE_BLOCK = 4
_CACHED_EPOCHS = 2  # the current epoch, and the next one while the loader prefetches across the boundary


class Schedule(EpochSteps, ABC):
    """The samples of every step of a training run; a pure function of the step.

    Args:
        num_samples: Samples per epoch.
        global_batch_size: Samples per step over all ranks.
        shuffle_block_size: Samples within which the order is shuffled.

    Raises:
        ValueError: The batch size is not positive.
    """

    def __init__(self, num_samples: int, global_batch_size: int, shuffle_block_size: int) -> None:
        super().__init__(num_samples, global_batch_size)
        self.shuffle_block_size = shuffle_block_size

    @abstractmethod
    def sample_ids(self, step: int) -> SampleIds:
        """Sample ids of a global step (from 0), in order: ``[global_batch_size]``, fewer at the end of an epoch."""

    def samples_by_source(self, step: int) -> dict[str, int]:
        """Number of samples of each source of a mixture before a global step; empty if there is no mixture."""
        return {}


class SampleSchedule(Schedule):
    """The samples of every step of a run on one dataset. See the module for the formula.

    Each sample that is not excluded is used exactly once per epoch. The last step of an epoch may have fewer samples.

    Args:
        shard_sizes: Samples per shard, in the order of the dataset's index.
        global_batch_size: Samples per step over all ranks.
        seed: Seed of the shuffle. Each epoch has a different order.
        shuffle_block_size: Samples per shuffle block; 0 means four times the largest shard. Smaller values than the
            largest shard needs are raised, because ``py1e`` cannot shuffle less than a shard.
        excluded: Sample ids that are never trained on (held out for evaluation).

    Attributes:
        num_samples: Samples per epoch, without the excluded ones.

    Raises:
        ValueError: No samples are left to train on, or the batch size is not positive.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        global_batch_size: int,
        seed: int,
        shuffle_block_size: int = 0,
        excluded: SampleIds | None = None,
    ) -> None:
        self._shard_sizes = np.asarray([size for size in shard_sizes if size > 0], dtype=np.int64)
        total = int(self._shard_sizes.sum())
        self._excluded = _excluded_mask(total, excluded)
        num_samples = total - (0 if self._excluded is None else int(self._excluded.sum()))
        if num_samples < 1:
            raise ValueError("the dataset has no samples to train on")
        super().__init__(num_samples, global_batch_size, _block_size(self._shard_sizes, shuffle_block_size))
        self.seed = seed
        self._cached_orders: OrderedDict[int, SampleIds] = OrderedDict()

    def sample_ids(self, step: int) -> SampleIds:
        """Sample ids of a global step (from 0), in order: ``[global_batch_size]``, fewer at the end of an epoch."""
        if step < 0:
            raise ValueError(f"steps count from 0, not {step}")
        order = self.epoch_order(self.epoch_of(step))
        start = (step % self.steps_per_epoch) * self.global_batch_size
        return order[start : start + self.global_batch_size]

    def epoch_order(self, epoch: int) -> SampleIds:
        """Sample ids of an epoch in training order: ``[num_samples]``, read-only."""
        order = self._cached_orders.get(epoch)
        if order is None:
            order = self._shuffle(epoch)
            self._cached_orders[epoch] = order
            while len(self._cached_orders) > _CACHED_EPOCHS:
                self._cached_orders.popitem(last=False)
        return order

    def _shuffle(self, epoch: int) -> SampleIds:
        # Imported on use: `streaming` imports cloud clients for seconds, and counting steps does not need it.
        from streaming.base.shuffle import get_shuffle

        order: SampleIds = get_shuffle("py1e", self._shard_sizes, 1, self.seed, epoch, self.shuffle_block_size)
        if self._excluded is not None:
            order = order[~self._excluded[order]]
        order.flags.writeable = False
        return order


def split_into_micro_batches(sample_ids: SampleIds, micro_batch_size: int) -> list[SampleIds]:
    """The samples of a step in micro-batches; the last one may be smaller.

    Micro-batch ``g`` of the result belongs to rank ``g mod world_size``.
    """
    return [sample_ids[start : start + micro_batch_size] for start in range(0, len(sample_ids), micro_batch_size)]


def held_out_ids(num_samples: int, fraction: float, seed: int) -> SampleIds:
    """Sample ids that are held out for evaluation, ascending: ``max(1, round(fraction * num_samples))`` of them.

    They are the ids with the lowest hash of (seed, id), so every machine and every version of NumPy choose the same.

    Raises:
        ValueError: The fraction is not between 0 and 1, or leaves no samples to train on.
    """
    count = held_out_count(num_samples, fraction)
    ids = np.arange(num_samples, dtype=np.uint64)
    ranked = np.argsort(_splitmix64(ids + _splitmix64(np.asarray([seed], dtype=np.uint64))), kind="stable")
    return np.sort(ranked[:count]).astype(np.int64)


def _splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The SplitMix64 hash of 64-bit integers (Steele, Lea and Flood, OOPSLA 2014)."""
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


def _block_size(shard_sizes: npt.NDArray[np.int64], requested: int) -> int:
    largest = int(shard_sizes.max(initial=1))
    # py1e draws each block's size from 0.75 to 1.25 times this value. A block smaller than a shard would leave that
    # shard unshuffled.
    minimum = math.ceil(largest / 0.75) + 1
    return max(requested or SHARDS_PER_SHUFFLE_BLOCK * largest, minimum)
