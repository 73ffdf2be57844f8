"""The summary of a run, from the records of its steps."""

from __future__ import annotations

from typing import Any

import pytest

from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.training.finalize import summarize_steps

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
