"""Faults other than kills, on a real run. tests/proof covers killed processes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming.base.format.mds import MDSWriter

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.live import LiveRun
from tests.trainer.support.runs import STEPS_PER_EPOCH, Layout, Runs, train_generation
from tests.trainer.support.tiny import VOCABULARY

pytestmark = pytest.mark.ray

WORKERS, ZERO_STAGE = 2, 2
EPOCHS = 14
STEPS = EPOCHS * STEPS_PER_EPOCH


def long_job(runs: Runs, hang_timeout: str = "10m") -> FinetuneJob:
    """Two CPU workers at ZeRO-2, with enough steps to disturb the run between, and a commit every four steps."""
    return runs.job(
        training={"epochs": EPOCHS},
        checkpoint={"every": 4},
        execution={"zeroStage": ZERO_STAGE, "microBatchSize": 3},
        workers={"count": WORKERS, "gpus": 0},
        retry={"hangTimeout": hang_timeout, "backoff": {"initial": "500ms", "max": "1s"}},
    )


@dataclass
class LiveRuns:
    """Runs that were started; the fixture cleans them up."""

    runs: Runs
    made: list[LiveRun]

    def new(self, name: str, job: FinetuneJob) -> LiveRun:
        run = LiveRun(self.runs.empty(name), job)
        self.made.append(run)
        return run


@dataclass(frozen=True)
class Undisturbed:
    """A run without any fault, and its summary."""

    directory: JobDirectory
    job: FinetuneJob
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def live(runs: Runs) -> Iterator[LiveRuns]:
    """Live runs of this module."""
    made = LiveRuns(runs, [])
    yield made
    for run in made.made:
        run.clean_up()


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> Undisturbed:
    """A run without any fault: two processes, no Ray."""
    directory, job = runs.empty("undisturbed"), long_job(runs)
    result = train_generation(directory, job, Layout(WORKERS, ZERO_STAGE), timeout=600)
    return Undisturbed(directory, job, result.summary)


def samples(directory: JobDirectory) -> list[str]:
    """Hash of the rows of every step of the surviving history."""
    return [record["samples"] for record in surviving_steps(directory)]


def broken_shards(runs: Runs, step: int) -> Path:
    """The corpus, with a token outside the vocabulary in one row of the given step (1-based)."""
    folder = runs.root / "broken-shards"
    job = runs.job()
    with ShardedDataset(str(runs.shards("seq2seq")), runs.root / "cache") as dataset:
        schedule = SampleSchedule(dataset.shard_sizes, job.spec.training.global_batch_size, job.spec.training.seed)
        bad = int(schedule.sample_ids(step - 1)[0])
        columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
        with MDSWriter(out=str(folder), columns=columns) as writer:
            for sample in range(dataset.num_samples):
                row = dataset[sample]
                unknown = np.full_like(row["input_ids"], VOCABULARY)
                writer.write({**row, "input_ids": unknown} if sample == bad else row)
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
def test_run_survives_a_hang_and_a_temporarily_missing_shard(live: LiveRuns, undisturbed: Undisturbed) -> None:
    run = live.new("hung", long_job(live.runs, hang_timeout="25s"))
    shards = live.runs.shards("seq2seq")
    run.start()
    run.wait_for_step(6)
    os.kill(run.workers()[0].pid, signal.SIGSTOP)
    run.wait_until(lambda: bool(run.events("failure")), "the end of the hang")
    away = shards.with_name("away")
    shutil.move(shards / "shard.00001.mds", away)
    try:
        run.wait_until(lambda: len(run.events("failure")) > 1, "the missing shard")
    finally:
        shutil.move(away, shards / "shard.00001.mds")
    code, output = run.wait()

    assert code == 0, output
    causes = [event["cause"] for event in run.events("failure")]
    assert causes[0] == "hang"
    assert "data" in causes
    assert "shard.00001.mds" in run.events("failure")[1]["message"]
    assert samples(run.directory) == samples(undisturbed.directory)
    assert run.result()["exportSha256"] == undisturbed.summary["exportSha256"]


@pytest.mark.timeout(600)
def test_data_that_always_fails_at_one_step_ends_the_job_with_the_error(live: LiveRuns) -> None:
    job = live.runs.job(
        dataset={"train": {"source": str(broken_shards(live.runs, step=5))}},
        execution={"zeroStage": 0, "microBatchSize": 3},
        workers={"count": 1, "gpus": 0},
        retry={"appFailureLimit": 2, "backoff": {"initial": "500ms", "max": "1s"}},
    )
    run = live.new("broken", job)
    run.start()
    code, output = run.wait()

    assert code == 20, output
    assert "index out of range" in output
    assert [event["cause"] for event in run.events("failure")] == ["appError", "appError"]
    assert not run.directory.result.exists()
