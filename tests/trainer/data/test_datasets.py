"""The datasets of a mixture: unique ids, samples held out of each source, and errors that name the source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.data.datasets import Datasets, check_local_manifests, open_datasets
from spotune_trainer.data.joined_shards import JoinedShards
from spotune_trainer.data.schedule import held_out_ids
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.tiny import make_job

Rows = list[dict[str, Any]]


@pytest.fixture
def job(write_shards: Callable[..., Path], rows: Rows) -> Callable[..., FinetuneJob]:
    """A function that makes a job of two sources of 60 and 40 rows; all tokens of row n are n."""
    folders = {"first": write_shards(rows[:60], "first"), "second": write_shards(rows[60:], "second")}

    def make(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None, **dataset: Any) -> FinetuneJob:
        mixture = [
            {"name": name, "train": {"source": str(folders[name])}, **(given or {})}
            for name, given in (("first", first), ("second", second))
        ]
        sections = {"train": None, "eval": None, "mixture": mixture, **dataset}
        return make_job("/model", dataset=sections, training={"globalBatchSize": 8})

    return make


def opened(job: FinetuneJob, tmp_path: Path) -> Datasets:
    return open_datasets(job, JobDirectory(tmp_path / "job"))


def test_ids_are_unique_over_the_mixture(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    datasets = opened(job(), tmp_path)
    assert [datasets.train[number]["input_ids"][0] for number in range(100)] == list(range(100))
    steps = range(datasets.schedule.steps_per_epoch)
    assert sorted(np.concatenate([datasets.schedule.sample_ids(step) for step in steps])) == list(range(100))
    assert datasets.evaluation is None
    with pytest.raises(IndexError, match="sample 100 of 100 in"):
        datasets.train[100]


def test_a_fraction_is_held_out_of_every_source_and_a_source_may_have_its_own(
    job: Callable[..., FinetuneJob], tmp_path: Path, write_shards: Callable[..., Path], rows: Rows
) -> None:
    separate = write_shards(rows[10:15], "separate")
    for own, expected in (
        ({}, held_out_ids(40, 0.1, 42) + 60),
        ({"eval": {"fraction": 0.2, "seed": 3}}, held_out_ids(40, 0.2, 3) + 60),
        ({"eval": {"source": str(separate)}}, np.arange(100, 105)),
    ):
        datasets = opened(job(second=own, eval={"fraction": 0.1}), tmp_path)
        by_source = {name: ids.tolist() for name, ids in datasets.evaluation_by_source.items()}
        assert by_source == {"first": held_out_ids(60, 0.1, 42).tolist(), "second": expected.tolist()}
        assert datasets.evaluation_ids.tolist() == sorted(by_source["first"] + by_source["second"])
        steps = range(datasets.schedule.steps_per_epoch)
        trained = np.concatenate([datasets.schedule.sample_ids(step) for step in steps])
        assert not set(trained.tolist()) & set(datasets.evaluation_ids.tolist())
        assert datasets.evaluation is not None
        tokens = [int(datasets.evaluation[sample_id]["input_ids"][0]) for sample_id in datasets.evaluation_ids.tolist()]
        assert tokens == [each if each < 100 else each - 90 for each in datasets.evaluation_ids.tolist()]


def test_the_index_of_every_source_identifies_the_data(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    hashes = opened(job(), tmp_path).index_hashes
    assert list(hashes) == ["mixture.first.train", "mixture.second.train"]
    assert len(set(hashes.values())) == 2


def test_a_missing_source_is_named(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    broken = job(second={"train": {"source": str(tmp_path / "nothing")}})
    with pytest.raises(JobError, match=r"dataset\.mixture\.second\.train: .*nothing is not a dataset of MDS shards"):
        opened(broken, tmp_path)


def test_a_source_that_would_be_repeated_too_often_is_refused(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    repeated = job(first={"weight": 1}, second={"weight": 4, "maxEpochs": 1})
    with pytest.raises(JobError, match=r"second: the run of 13 steps needs 80 samples .* its maxEpochs is 1"):
        opened(repeated, tmp_path)


def test_sources_of_other_lengths_are_refused(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    mixture = job()
    check_local_manifests(mixture, JobDirectory(tmp_path / "job"))
    for source, length in zip(mixture.spec.dataset.mixture, (256, 512), strict=True):
        assert source.train is not None
        manifest = {"tokenizerHash": "abc", "options": {"text": {"task": "seq2seq", "maxLength": length}}}
        (Path(source.train.source) / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(JobError, match=r"the sources first and second have another maxLength \(256 and 512\)"):
        check_local_manifests(mixture, JobDirectory(tmp_path / "job"))


def test_shards_of_all_sources_are_prefetched(job: Callable[..., FinetuneJob], tmp_path: Path) -> None:
    train = opened(job(), tmp_path).train
    assert train.prefetch([0, 99, 15])
    assert train[99]["input_ids"][0] == 99
    assert train.prefetch(np.arange(100))
    train.close()


def test_a_source_at_its_limit_of_prefetched_shards_does_not_stop_the_others(
    write_shards: Callable[..., Path], rows: Rows, tmp_path: Path
) -> None:
    folders = [write_shards(rows[:60], "first"), write_shards(rows[60:], "second")]
    joined = JoinedShards([ShardedDataset(str(folder), tmp_path, max_prefetched_shards=1) for folder in folders])
    assert not joined.prefetch([0, 10, 60]), "the second shard of the first source has to wait"
    assert joined.prefetch([0, 60]), "both are being fetched"
    joined.close()
