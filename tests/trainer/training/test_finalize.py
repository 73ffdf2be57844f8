"""The summary of a run, from the records of its steps."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from spotune_trainer import files
from spotune_trainer.checkpoint.reader import read_parameters
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.training import finalize
from spotune_trainer.training.failures import EvaluationMemoryError
from spotune_trainer.training.finalize import summarize_steps
from spotune_trainer.training.worker import TrainResult, Worker
from tests.trainer.support.runs import Layout, Runs, committed, train_generation

SCHEDULE = SampleSchedule([10], 4, seed=0)  # steps of 4, 4 and 2 samples


def record(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.0, "seconds": 0.5, "mfu": None, "tokens": 100, "labelTokens": 60, **values}


def test_tokens_per_second_counts_all_tokens_and_label_tokens_are_reported_separately() -> None:
    summary = summarize_steps([record(1), record(2), record(3), record(4)], SCHEDULE)
    assert (summary["steps"], summary["samples"]) == (4, 14)
    assert (summary["tokens"], summary["labelTokens"], summary["tokensPerSecond"]) == (400, 240, 200.0)


def test_records_of_an_older_version_have_label_tokens_only() -> None:
    older = record(1, tokens=60)
    del older["labelTokens"]
    summary = summarize_steps([older, record(2)], SCHEDULE)
    assert (summary["tokens"], summary["labelTokens"], summary["tokensPerSecond"]) == (None, 120, 200.0)
    assert summarize_steps([older], SCHEDULE)["tokensPerSecond"] is None


def test_mfu_is_the_time_weighted_mean_of_the_measured_steps() -> None:
    summary = summarize_steps([record(1, mfu=0.5, seconds=1.0), record(2, mfu=0.2, seconds=2.0), record(3)], SCHEDULE)
    assert summary["mfu"] == pytest.approx(0.3)
    assert summarize_steps([record(1)], SCHEDULE)["mfu"] is None


class CountsHeartbeats(Worker):
    """Writes how many heartbeats the export sends, which begins with the release of the engine."""

    def train(self) -> TrainResult:
        result = super().train()
        files.write_json(self.context.directory.root / "beats.json", {"count": next(self.beats)})
        return result

    def release(self) -> None:
        super().release()
        self.beats = count()
        self.reporter.heartbeat = lambda: next(self.beats)  # type: ignore[method-assign, assignment]


def test_rates_count_the_wait_for_data_but_no_evaluation_and_no_checkpoint() -> None:
    times = {"seconds": 9.0, "productiveSeconds": 0.4, "dataWaitSeconds": 0.1}
    summary = summarize_steps([record(1, mfu=0.5, **times), record(2, mfu=0.2, seconds=0.25)], SCHEDULE)
    assert (summary["tokensPerSecond"], summary["samplesPerSecond"]) == (266.7, 10.7)
    assert summary["mfu"] == pytest.approx(0.4), "of an older line, the whole time counts"


@pytest.mark.parametrize(("asked", "limit", "tried"), [(0, None, 16), (48, None, 48), (48, 8, 8)])
def test_evaluation_that_runs_out_of_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, asked: int, limit: int | None, tried: int
) -> None:
    def out_of_memory(*_: object, batch_size: int, **__: object) -> None:
        assert batch_size == tried
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(finalize, "evaluate", out_of_memory)
    monkeypatch.setattr(finalize, "evaluation_weights", nullcontext)
    context = MagicMock()
    context.plan = RunPlan(1, "", 0, 4, False, "", {}, evaluation_batch_limit=limit)  # micro-batches of 4
    context.job.spec.training.evaluation.batch_size = asked
    with pytest.raises(EvaluationMemoryError) as raised:
        finalize.run_evaluation(context, 3)
    assert raised.value.batch_size == tried


def test_without_a_finite_loss_there_is_no_mean_loss() -> None:
    assert summarize_steps([record(1, loss=None), record(2)], SCHEDULE)["trainLoss"] == 2.0
    assert summarize_steps([record(1, loss=None)], SCHEDULE)["trainLoss"] is None


@pytest.mark.slow
def test_an_export_that_makes_progress_is_no_hang(runs: Runs) -> None:
    directory = runs.empty("export-heartbeats")
    job = runs.job(training={"epochs": None, "maxSteps": 3})
    result = train_generation(directory, job, Layout(1, 0), CountsHeartbeats)
    beats = files.read_json(directory.root / "beats.json")
    assert beats is not None
    read = len(read_parameters(committed(directory, result.summary["steps"])))
    assert beats["count"] > 2 * read, "for each tensor, as it is read and as it is exported"
