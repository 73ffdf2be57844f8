"""The micro-batches of one rank, read and collated in the background a few steps ahead of training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from spotune.errors import JobError
from spotune_trainer.data.batches import Batch, Task, collate
from spotune_trainer.data.schedule import SampleIds, SampleSchedule, micro_batches
from spotune_trainer.data.shards import ShardedDataset

MicroBatches = list[tuple[int, Batch]]


class MicroBatchLoader:
    """Iterates over steps; each item is the list of this rank's micro-batches ``(g, batch)`` of that step.

    Micro-batch ``g`` of a step belongs to rank ``g mod world_size``, so a rank may have none in a step. What goes
    wrong while reading is raised to the one who iterates, at the step it belongs to.

    Args:
        dataset: Rows with ``input_ids`` (see ``batches``).
        schedule: Which samples each step trains on.
        task: ``causal`` or ``seq2seq``.
        pad_token_id: Fills ``input_ids``.
        micro_batch_size: Samples per micro-batch.
        rank: This worker, 0-based.
        world_size: Number of workers.
        first_step: 0-based global step to begin with.
        last_step: Global step to end before.
        depth: Steps read ahead.
        width_multiple: Batches are padded to a multiple of so many tokens.

    Raises:
        JobError: The dataset holds no tokenised rows.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        schedule: SampleSchedule,
        task: Task,
        pad_token_id: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        first_step: int = 0,
        last_step: int = 0,
        depth: int = 4,
        width_multiple: int = 1,
    ) -> None:
        needed = {"input_ids"} | ({"labels"} if task == "seq2seq" else set())
        missing = needed - dataset.columns.keys()
        if missing:
            raise JobError(
                f"{dataset.source} has no {' and '.join(sorted(missing))} (it has {', '.join(dataset.columns)}). "
                f"{task} training reads tokenised rows: write them with `spotune shard`"
            )
        self._dataset = dataset
        self._schedule = schedule
        self._task: Task = task
        self._pad_token_id = pad_token_id
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._steps = range(first_step, last_step)
        self._depth = depth
        self._width_multiple = width_multiple
        self._are_pinned = torch.cuda.is_available()
        # Far enough that the shards of the next shuffle block are on their way; the dataset bounds how many.
        self._steps_prefetched_ahead = depth + math.ceil(schedule.shuffle_block_size / schedule.global_batch_size)
        self._next_prefetch = first_step

    def prefetch(self) -> None:
        """Begin to fetch the shards of the first steps; reading begins with the iteration."""
        self._prefetch(self._steps.start)

    def __iter__(self) -> Generator[MicroBatches]:
        reader = ThreadPoolExecutor(1, thread_name_prefix="micro-batches")
        pending: deque[Future[MicroBatches]] = deque()
        try:
            for step in self._steps:
                pending.append(reader.submit(self._read, step))
                if len(pending) > self._depth:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> MicroBatches:
        self._prefetch(step)
        return [(g, self._batch(ids)) for g, ids in self._own(step)]

    def _own(self, step: int) -> list[tuple[int, SampleIds]]:
        every = micro_batches(self._schedule.sample_ids(step), self._micro_batch_size)
        return list(enumerate(every))[self._rank :: self._world_size]

    def _batch(self, sample_ids: SampleIds) -> Batch:
        rows = [self._dataset[sample_id] for sample_id in sample_ids.tolist()]
        batch = collate(rows, self._task, self._pad_token_id, sample_ids, width_multiple=self._width_multiple)
        return batch.pin() if self._are_pinned else batch

    def _prefetch(self, step: int) -> None:
        end = min(step + self._steps_prefetched_ahead, self._steps.stop)
        while self._next_prefetch < end:
            own = [ids for _, ids in self._own(self._next_prefetch)]
            if own and not self._dataset.prefetch(np.concatenate(own)):
                return
            self._next_prefetch += 1
