"""Exactness: every world size and ZeRO stage trains on the same samples with the same losses."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming.base.format.mds import MDSWriter

from spotune_trainer import files
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.data.batches import Batch, collate, row_hash
from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.data.schedule import SampleSchedule, held_out_ids, split_into_micro_batches
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.models.pretrained import build_model
from spotune_trainer.training.worker import Worker
from tests.trainer.support.groups import GroupFailedError, run_group
from tests.trainer.support.runs import (
    BATCH,
    MICRO_BATCH,
    SAMPLES,
    STEPS,
    STEPS_PER_EPOCH,
    Layout,
    Runs,
    losses,
    make_task,
    once_per_epoch,
    sample_hashes,
    start_generation,
    train_generation,
    train_rank,
)

pytestmark = pytest.mark.slow

ALONE = Layout(1, 0)
FP32 = 1e-6
LAYOUTS = [
    *(Layout(2, 0), Layout(3, 1), Layout(5, 2), Layout(3, 3)),
    *(
        pytest.param(layout, marks=pytest.mark.long)
        for layout in (
            *(Layout(3, 0), Layout(5, 0)),
            *(Layout(1, 1), Layout(2, 1)),
            Layout(2, 2),
            *(Layout(1, 3), Layout(2, 3)),
        )
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_on_the_same_samples_with_the_same_losses(runs: Runs, layout: Layout) -> None:
    expected, run = runs.finished(ALONE), runs.finished(layout)
    assert sample_hashes(run) == sample_hashes(expected)
    assert len(losses(run)) == STEPS
    assert losses(run) == pytest.approx(losses(expected), rel=FP32)
    norms = [[record["gradNorm"] for record in surviving_steps(each)] for each in (run, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_causal_models_train_the_same_at_another_layout(runs: Runs) -> None:
    expected, run = runs.finished(ALONE, "causal"), runs.finished(Layout(3, 2), "causal")
    assert sample_hashes(run) == sample_hashes(expected)
    assert losses(run) == pytest.approx(losses(expected), rel=FP32)


def test_micro_batch_size_changes_neither_samples_nor_losses(runs: Runs) -> None:
    """So it may be halved after an out-of-memory error. Without dropout, which is drawn for each micro-batch."""
    job = runs.job(dropout=False)
    whole, halves = runs.empty("whole"), runs.empty("halves")
    train_generation(whole, job, ALONE, micro_batch_size=8)
    train_generation(halves, job, Layout(2, 1), micro_batch_size=4)
    assert sample_hashes(halves) == sample_hashes(whole)
    assert losses(halves) == pytest.approx(losses(whole), rel=FP32)


def test_dropout_is_on_in_these_runs(runs: Runs) -> None:
    plain = runs.empty("plain")
    train_generation(plain, runs.job(dropout=False, training={"maxSteps": 1, "warmupSteps": 0}), ALONE)
    assert losses(plain)[0] != pytest.approx(losses(runs.finished(ALONE))[0], rel=1e-4)


@pytest.mark.parametrize("task", ["seq2seq", "causal"])
def test_loss_is_the_mean_over_the_tokens_of_the_step(runs: Runs, task: str) -> None:
    """It is not the mean of the micro-batches' means, which differs if rows have uneven lengths."""
    job = runs.job(task, dropout=False, training={"maxSteps": 1, "warmupSteps": 0})
    directory = runs.empty("one-step")
    train_generation(directory, job, Layout(3, 2))
    dataset, schedule = open_data(runs, task)
    model = build_model(job).eval()
    sums, means, tokens = [], [], 0
    for ids in split_into_micro_batches(schedule.sample_ids(0), MICRO_BATCH):
        batch = collate([dataset[i] for i in ids.tolist()], job.spec.model.task, 0, ids)
        with torch.no_grad():
            mean = model(**batch.model_inputs()).loss.item()
        means.append(mean)
        sums.append(mean * batch.loss_tokens)
        tokens += batch.loss_tokens
    (record,) = surviving_steps(directory)
    assert record["labelTokens"] == tokens
    assert record["tokens"] == sum(_model_tokens(dataset[i], task) for i in schedule.sample_ids(0).tolist())
    assert record["loss"] == pytest.approx(sum(sums) / tokens, rel=FP32)
    assert record["loss"] != pytest.approx(sum(means) / len(means), rel=1e-3)


@pytest.mark.parametrize("task", ["seq2seq", "causal"])
def test_every_step_trains_on_the_scheduled_rows(runs: Runs, task: str) -> None:
    dataset, schedule = open_data(runs, task)
    expected = [
        sum(row_hash(i, dataset[i]) for i in schedule.sample_ids(step).tolist()) % (1 << 64) for step in range(STEPS)
    ]
    assert sample_hashes(runs.finished(ALONE, task)) == [f"{value:016x}" for value in expected]


def test_every_sample_is_trained_on_once_per_epoch(runs: Runs) -> None:
    """The last step of an epoch trains on the remaining samples."""
    assert once_per_epoch(runs, runs.finished(Layout(2, 2)))
    summary = runs.summary(Layout(2, 2))
    assert (summary["steps"], summary["samples"]) == (STEPS, 2 * SAMPLES)
    records = surviving_steps(runs.finished(Layout(2, 2)))
    assert summary["tokens"] == sum(record["tokens"] for record in records)
    assert summary["labelTokens"] == sum(record["labelTokens"] for record in records) < summary["tokens"]
    dataset, schedule = open_data(runs, "seq2seq")
    last = schedule.sample_ids(STEPS_PER_EPOCH - 1)
    assert len(last) == SAMPLES % BATCH
    record = surviving_steps(runs.finished(Layout(2, 2)))[STEPS_PER_EPOCH - 1]
    assert record["labelTokens"] == sum(len(dataset[i]["labels"]) for i in last.tolist())
    assert record["tokens"] == sum(_model_tokens(dataset[i], "seq2seq") for i in last.tolist())
    assert record["epoch"] == 1.0


class ChangingWorker(Worker):
    """Replaces the rows of one micro-batch of the fourth step by those of `_other_ids`; here they are the same."""

    def batches(self) -> Generator[MicroBatches]:
        for step, batches in enumerate(super().batches(), start=self.context.first_step):
            yield [(g, self._changed(batch) if (step, g) == (3, 1) else batch) for g, batch in batches]

    def _changed(self, batch: Batch) -> Batch:
        ids = self._other_ids(batch.sample_ids.tolist())
        return collate([self.context.datasets.train[i] for i in ids], self.job.spec.model.task, 0, ids)

    def _other_ids(self, ids: list[int]) -> list[int]:
        return ids


class SkippingWorker(ChangingWorker):
    """Skips one row."""

    def _other_ids(self, ids: list[int]) -> list[int]:
        return ids[1:]


class RepeatingWorker(ChangingWorker):
    """Trains on one row twice, in place of another one."""

    def _other_ids(self, ids: list[int]) -> list[int]:
        return [ids[0], *ids[:-1]]


@pytest.mark.parametrize(
    ("worker", "exact"), [(ChangingWorker, True), (SkippingWorker, False), (RepeatingWorker, False)]
)
def test_loader_that_skips_or_repeats_one_row_is_detected(
    runs: Runs, worker: type[ChangingWorker], exact: bool
) -> None:
    """Negative control: the checks of this module fail for a wrong row, and pass for a worker that changes nothing."""
    directory = runs.empty(worker.__name__)
    train_generation(directory, runs.job(), ALONE, worker)
    undisturbed = runs.finished(ALONE)
    differing = [
        s for s, (a, b) in enumerate(zip(sample_hashes(directory), sample_hashes(undisturbed), strict=True)) if a != b
    ]
    assert differing == ([] if exact else [3])
    assert once_per_epoch(runs, directory) is exact
    assert (losses(directory) == losses(undisturbed)) is exact


def test_nonfinite_loss_fails_the_run_with_advice(runs: Runs) -> None:
    job = runs.job(training={"learningRate": 1e30, "maxGradNorm": 0, "warmupSteps": 0, "maxBadSteps": 0})
    with pytest.raises(
        GroupFailedError, match=r"JobError: training: the (loss|gradient) of step \d is n.* \(samples .*learningRate"
    ):
        train_generation(runs.empty("diverging"), job, ALONE)


def test_evaluation_does_not_change_training(runs: Runs) -> None:
    """Evaluation between steps uses no dropout, keeps no gradients and does not move the loader."""
    layout, directory = Layout(2, 1), runs.empty("evaluated")
    job = runs.job(
        dataset={"eval": {"source": str(runs.shards("seq2seq"))}}, training={"evaluation": {"everySteps": 4}}
    )
    result = train_generation(directory, job, layout)
    assert losses(directory) == losses(runs.finished(layout))
    evaluated = [
        event for event in files.read_lines(directory.generation_logs(1).events) if event["event"] == "evaluated"
    ]
    assert [event["step"] for event in evaluated] == [4, 8, STEPS]
    assert result.summary["evalLoss"] == evaluated[-1]["loss"] < evaluated[0]["loss"]


def test_held_out_samples_are_not_trained_on(runs: Runs) -> None:
    directory = runs.empty("held-out")
    job = runs.job(dataset={"eval": {"fraction": 0.2, "seed": 1}}, training={"epochs": 1})
    result = train_generation(directory, job, Layout(2, 0))
    dataset, _ = open_data(runs, "seq2seq")
    trained = set(range(SAMPLES)) - set(held_out_ids(SAMPLES, 0.2, 1).tolist())
    expected = sum(row_hash(i, dataset[i]) for i in trained) % (1 << 64)
    assert sum(int(value, 16) for value in sample_hashes(directory)) % (1 << 64) == expected
    assert result.summary["samples"] == len(trained) == 60


def test_recomputed_activations_draw_the_same_dropout(runs: Runs) -> None:
    directory = runs.empty("recomputed")
    task = make_task(directory, runs.job(), Layout(2, 2), start_generation(directory))
    task.plan["gradientCheckpointing"] = True
    run_group(2, train_rank, task)
    assert losses(directory) == pytest.approx(losses(runs.finished(Layout(2, 2))), rel=FP32)


def test_rows_without_label_tokens_are_a_job_error_that_names_them(runs: Runs, tmp_path: Path) -> None:
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    with MDSWriter(out=str(tmp_path), columns=columns, hashes=["xxh3_64"]) as writer:
        for _ in range(2):
            writer.write({"input_ids": np.full(4, 5, np.int32), "labels": np.full(4, -100, np.int32)})
    job = runs.job("causal", dataset={"train": {"source": str(tmp_path)}})
    with pytest.raises(
        GroupFailedError, match=r"JobError: dataset: no row of step 1 contributes to the loss \(samples "
    ):
        train_generation(runs.empty("no-labels"), job, ALONE)


def _model_tokens(row: Mapping[str, Any], task: str) -> int:
    """Tokens of a row that go through the model: the input, and for seq2seq also the decoder's input."""
    return len(row["input_ids"]) + (len(row["labels"]) if task == "seq2seq" else 0)


def open_data(runs: Runs, task: str) -> tuple[ShardedDataset, SampleSchedule]:
    """The data set and schedule of a run, opened independently of the trainer."""
    dataset = ShardedDataset(str(runs.shards(task)), runs.root / "cache")
    return dataset, SampleSchedule(dataset.shard_sizes, BATCH, seed=7)
