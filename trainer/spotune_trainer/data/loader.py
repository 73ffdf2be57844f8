"""The data loader of a rank: reads and collates its micro-batches in the background, a few steps ahead of training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from spotune.errors import JobError
from spotune_trainer.data.batches import Batch, Task, collate
from spotune_trainer.data.joined_shards import JoinedShards
from spotune_trainer.data.schedule import SampleIds, Schedule, split_into_micro_batches
from spotune_trainer.data.shards import ShardedDataset

MicroBatches = list[tuple[int, Batch]]


class MicroBatchLoader:
    """Iterates over steps; each item is the list of this rank's micro-batches ``(g, batch)`` in that step.

    Micro-batch ``g`` of a step belongs to rank ``g mod world_size``, so the list may be empty. An error while reading
    in the background is raised by the iterator, at the step that it belongs to.

    Args:
        dataset: Rows with ``input_ids`` (see ``batches``).
        schedule: The samples of each step.
        task: ``causal`` or ``seq2seq``.
        pad_token_id: Padding of ``input_ids``.
        micro_batch_size: Samples per micro-batch.
        rank: This rank, from 0.
        world_size: Number of ranks.
        first_step: First global step, from 0.
        last_step: Global step to stop before.
        prefetch_steps: Steps that are read ahead.
        pad_to_multiple_of: Sequence lengths are rounded up to a multiple of this.
        reference_log_probs: Returns those of the pairs of rows with these sample ids, ``[pairs, 2]``.

    Raises:
        JobError: The dataset has no tokenized rows.
    """

    def __init__(
        self,
        dataset: ShardedDataset | JoinedShards,
        schedule: Schedule,
        task: Task,
        pad_token_id: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        first_step: int = 0,
        last_step: int = 0,
        prefetch_steps: int = 4,
        pad_to_multiple_of: int = 1,
        reference_log_probs: Callable[[SampleIds], npt.NDArray[np.float32]] | None = None,
    ) -> None:
        needed = {"input_ids"} | ({"labels"} if task == "seq2seq" else set())
        missing = needed - dataset.columns.keys()
        if missing:
            raise JobError(
                f"{dataset.source} has no {' and '.join(sorted(missing))} (it has {', '.join(dataset.columns)}). "
                f"{task} training needs tokenized rows: write them with `spotune shard`"
            )
        self._dataset = dataset
        self._schedule = schedule
        self._task: Task = task
        self._pad_token_id = pad_token_id
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._steps = range(first_step, last_step)
        self._prefetch_steps = prefetch_steps
        self._pad_to_multiple_of = pad_to_multiple_of
        self._reference_log_probs = reference_log_probs
        self._pin_memory = torch.cuda.is_available()
        # Shards are prefetched one shuffle block further than batches, so the next block's shards arrive in time. The
        # dataset limits how many shards that is.
        steps_per_block = math.ceil(schedule.shuffle_block_size / schedule.global_batch_size)
        self._shard_prefetch_steps = prefetch_steps + steps_per_block
        self._next_prefetch = first_step

    def prefetch(self) -> None:
        """Start fetching the shards of the first steps. Samples are read once the iteration starts."""
        self._prefetch(self._steps.start)

    def __iter__(self) -> Generator[MicroBatches]:
        reader = ThreadPoolExecutor(1, thread_name_prefix="micro-batches")
        pending: deque[Future[MicroBatches]] = deque()
        try:
            for step in self._steps:
                pending.append(reader.submit(self._read, step))
                if len(pending) > self._prefetch_steps:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> MicroBatches:
        self._prefetch(step)
        return [(g, self._collate(ids)) for g, ids in self._local_micro_batches(step)]

    def _local_micro_batches(self, step: int) -> list[tuple[int, SampleIds]]:
        micro_batches = split_into_micro_batches(self._schedule.sample_ids(step), self._micro_batch_size)
        return list(enumerate(micro_batches))[self._rank :: self._world_size]

    def _collate(self, sample_ids: SampleIds) -> Batch:
        rows = [self._dataset[sample_id] for sample_id in sample_ids.tolist()]
        reference = self._reference_log_probs(sample_ids) if self._reference_log_probs else None
        batch = collate(
            rows,
            self._task,
            self._pad_token_id,
            sample_ids,
            pad_to_multiple_of=self._pad_to_multiple_of,
            reference_log_probs=reference,
        )
        return batch.pin() if self._pin_memory else batch

    def _prefetch(self, step: int) -> None:
        stop = min(step + self._shard_prefetch_steps, self._steps.stop)
        while self._next_prefetch < stop:
            local = [ids for _, ids in self._local_micro_batches(self._next_prefetch)]
            if local and not self._dataset.prefetch(np.concatenate(local)):
                return
            self._next_prefetch += 1
