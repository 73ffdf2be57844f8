"""The loader gives each rank its micro-batches, reads ahead, and raises errors at their step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spotune.errors import JobError
from spotune_trainer.data.batches import combine_hashes, row_hash
from spotune_trainer.data.loader import MicroBatches, MicroBatchLoader
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.data.shards import ShardedDataset
from tests.trainer.data.conftest import WriteShards

Rows = list[dict[str, Any]]


@pytest.fixture
def dataset(write_shards: WriteShards, rows: Rows, tmp_path: Path) -> ShardedDataset:
    return ShardedDataset(str(write_shards(rows)), tmp_path / "cache")


def loader(dataset: ShardedDataset, steps: tuple[int, int], rank: int = 0, world_size: int = 1) -> MicroBatchLoader:
    schedule = SampleSchedule(dataset.shard_sizes, 24, seed=42)
    return MicroBatchLoader(dataset, schedule, "seq2seq", 0, 5, rank, world_size, *steps, prefetch_steps=2)


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("micro-batches")]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_all_ranks_together_get_the_scheduled_samples(dataset: ShardedDataset, rows: Rows, world_size: int) -> None:
    schedule = SampleSchedule(dataset.shard_sizes, 24, seed=42)
    by_rank = [list(loader(dataset, (3, 9), rank, world_size)) for rank in range(world_size)]
    for offset, step in enumerate(range(3, 9)):
        together = dict(sorted(item for steps in by_rank for item in steps[offset]))
        assert list(together) == list(range(len(together)))
        ids = np.concatenate([batch.sample_ids for batch in together.values()])
        assert np.array_equal(ids, schedule.sample_ids(step))
        hashes = [value for batch in together.values() for value in batch.row_hashes()]
        assert combine_hashes(hashes) == combine_hashes([row_hash(int(i), rows[i]) for i in ids])


def test_a_rank_without_micro_batches_still_gets_every_step(dataset: ShardedDataset) -> None:
    assert list(loader(dataset, (0, 3), rank=6, world_size=7)) == [[], [], []]


def test_an_error_is_raised_at_its_step_and_not_before(
    dataset: ShardedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = SampleSchedule(dataset.shard_sizes, 24, seed=42)
    bad = int(schedule.sample_ids(2)[0])
    real = ShardedDataset.__getitem__

    def read(self: ShardedDataset, sample_id: int) -> dict[str, Any]:
        if sample_id == bad:
            raise JobError("shard.00001.mds is damaged")
        return real(self, sample_id)

    monkeypatch.setattr(ShardedDataset, "__getitem__", read)
    steps = iter(loader(dataset, (0, 5)))
    next(steps)
    next(steps)
    with pytest.raises(JobError, match="damaged"):
        next(steps)
    assert not reader_threads()


def test_closing_the_iterator_stops_the_reader_thread(dataset: ShardedDataset) -> None:
    for _ in loader(dataset, (0, 1000)):
        break
    assert not reader_threads()


def test_at_most_prefetch_steps_are_read_ahead(dataset: ShardedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = MicroBatchLoader._read

    def recorded(self: MicroBatchLoader, step: int) -> MicroBatches:
        read.append(step)
        return real(self, step)

    monkeypatch.setattr(MicroBatchLoader, "_read", recorded)
    steps = iter(loader(dataset, (0, 100)))
    next(steps)
    assert set(read) <= {0, 1, 2}
    steps.close()


def test_raw_text_shards_are_rejected_with_a_hint(write_shards: WriteShards, tmp_path: Path) -> None:
    folder = write_shards([{"question": "a"}], columns={"question": "str"})
    raw = ShardedDataset(str(folder), tmp_path)
    with pytest.raises(JobError, match=r"no input_ids and labels \(it has question\).*spotune shard"):
        loader(raw, (0, 1))
