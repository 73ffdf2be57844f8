"""The sample schedule of a mixture: which samples of which source each step trains on, as a pure function.

`sampling.mixture_plan` says how many samples of each source come before a step; here the samples of one step are
listed. The draws of a source are numbered over the whole run: draw ``d`` of a source of ``n`` samples is sample
``d mod n`` of its epoch ``d // n``, in the order of its own `SampleSchedule`. So a source is used up before any of its
samples comes again.

Ids of samples are unique over the mixture: to the id within its source is added the number of samples of all sources
before it, held-out ones included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spotune_trainer.data.sampling.interleave import Interleave
from spotune_trainer.data.sampling.mixture_plan import MixturePlan
from spotune_trainer.data.schedule import SampleIds, SampleSchedule, Schedule

_LARGEST_TIME = 1 << 62


class MixtureSchedule(Schedule):
    """The samples of every step of a run on a mixture. See the module for the formula.

    Args:
        plan: The sources and their shares.
        orders: The order of the samples of each source in its epochs.
        first_ids: Added to the ids of each source's samples.
    """

    def __init__(self, plan: MixturePlan, orders: Sequence[SampleSchedule], first_ids: Sequence[int]) -> None:
        block = sum(order.shuffle_block_size for order in orders)
        super().__init__(plan.num_samples, plan.global_batch_size, block)
        self.plan = plan
        self._orders = tuple(orders)
        self._first_ids = tuple(first_ids)

    def sample_ids(self, step: int) -> SampleIds:
        """Sample ids of a global step (from 0), in order: ``[global_batch_size]``, fewer at the end of an epoch."""
        stage = self.plan.stage_of(step)
        start, stop = (self.samples_before(each) - stage.position for each in (step, step + 1))
        members, draws = draws_between(stage.interleave, start, stop)
        ids = np.empty(stop - start, dtype=np.int64)
        for member, source in enumerate(stage.sources):
            mine = members == member
            ids[mine] = self._ids_of_draws(source, draws[mine] + stage.drawn[source])
        return ids

    def samples_by_source(self, step: int) -> dict[str, int]:
        """Number of samples of each source before a global step, which counts from 0."""
        return self.plan.samples_by_source(step)

    def _ids_of_draws(self, source: int, draws: npt.NDArray[np.int64]) -> SampleIds:
        order = self._orders[source]
        epochs, positions = np.divmod(draws, order.num_samples)
        ids = np.empty(len(draws), dtype=np.int64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            ids[mine] = order.epoch_order(int(epoch))[positions[mine]]
        return ids + self._first_ids[source]


def draws_between(interleave: Interleave, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The source of each position from ``start`` up to ``stop``, and the number of its draw, both from 0."""
    least = interleave.least_counts(start)
    ranges = list(zip(least, interleave.most_counts(stop), interleave.strides, strict=True))
    largest = max((2 * last + 1) * stride for _, last, stride in ranges)
    kind: Any = np.int64 if largest < _LARGEST_TIME else object
    times = np.concatenate([(2 * np.arange(first, last).astype(kind) + 1) * stride for first, last, stride in ranges])
    sources = np.repeat(np.arange(len(ranges)), [last - first for first, last, _ in ranges])
    draws = np.concatenate([np.arange(first, last, dtype=np.int64) for first, last, _ in ranges])
    order = np.argsort(times, kind="stable")  # draws with the same time stay in the order of the sources
    chosen = order[start - sum(least) :][: stop - start]
    return sources[chosen], draws[chosen]
