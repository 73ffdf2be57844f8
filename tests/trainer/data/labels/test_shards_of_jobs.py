"""Shards with labels belong to an objective, and to a list of labels in its order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.data.datasets import open_datasets
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.labelled import ROWS, TOPICS, labelled_job

REVERSED = list(reversed(TOPICS))


def changed(job: FinetuneJob, objective: str | None = None, **dataset: Any) -> FinetuneJob:
    """The job with other values."""
    content = job.model_dump(mode="json", exclude_none=True)
    content["spec"]["dataset"] |= dataset
    content["spec"]["training"]["objective"] = objective or content["spec"]["training"]["objective"]
    return FinetuneJob.model_validate(content)


def opened(job: FinetuneJob, folder: Path) -> int:
    """Number of samples of the training data of a job."""
    return open_datasets(job, JobDirectory(folder / "job")).train.num_samples


def test_the_labels_of_the_shards_are_taken(tmp_path: Path) -> None:
    assert opened(labelled_job(tmp_path), tmp_path) == ROWS


def test_another_order_of_labels_is_refused(tmp_path: Path) -> None:
    job = changed(labelled_job(tmp_path), labels=REVERSED)
    with pytest.raises(
        JobError, match=r"dataset\.labels: the shards .* with the labels music, sport, weather, and the "
    ):
        opened(job, tmp_path)


def test_shards_in_a_store_have_their_manifest_beside_them(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTUNE_CACHE", str(tmp_path / "cache"))
    job = labelled_job(tmp_path)
    for path in (tmp_path / "shards").iterdir():
        s3.upload_file(str(path), "bucket", f"labels/train/{path.name}")
    stored: dict[str, Any] = {"train": {"source": "s3://bucket/labels/train"}}
    assert opened(changed(job, **stored), tmp_path) == ROWS
    with pytest.raises(JobError, match=r"^dataset: dataset\.labels|^dataset\.labels: the shards s3://bucket/labels"):
        opened(changed(job, labels=REVERSED, **stored), tmp_path)

    s3.upload_file(str(tmp_path / "shards" / "manifest.json"), "bucket", "labels/manifest.json")
    s3.delete_object(Bucket="bucket", Key="labels/train/manifest.json")
    with pytest.raises(JobError, match="the shards s3://bucket/labels/train were written with the labels music"):
        opened(changed(job, labels=REVERSED, **stored), tmp_path)
    s3.delete_object(Bucket="bucket", Key="labels/manifest.json")
    assert opened(changed(job, labels=REVERSED, **stored), tmp_path) == ROWS, "nothing tells their labels"


def test_another_objective_is_refused(tmp_path: Path) -> None:
    job = labelled_job(tmp_path)
    none: dict[str, Any] = {"text": "", "label": "", "labels": []}
    with pytest.raises(JobError, match=r"has labels, which dpo does not learn: use classification, or shards"):
        opened(changed(job, "dpo", **none), tmp_path)
    with pytest.raises(
        JobError, match=r"tokenClassification learns labels of words, and .* has none: write the shards"
    ):
        opened(changed(job, "tokenClassification"), tmp_path)
