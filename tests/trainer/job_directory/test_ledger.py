"""The ledger: events in order, and what the retry policy and `status.restarts` derive from them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from spotune.retry import Failure, FailureCause
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import COUNTED_CAUSES, Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(JobDirectory(tmp_path))


def test_events_are_kept_in_order_with_their_time(ledger: Ledger) -> None:
    assert ledger.records() == []
    before = time.time()
    ledger.append("attempt-started", attempt=1)
    ledger.append_record({"time": 5.0, "event": "committed", "step": 10, "generation": 1})
    ledger.append("attempt-ended", exitCode=10)
    assert [record["event"] for record in ledger.records()] == ["attempt-started", "committed", "attempt-ended"]
    assert [record["event"] for record in ledger.records("committed", "attempt-ended")] == [
        "committed",
        "attempt-ended",
    ]
    assert before <= ledger.records("attempt-started")[0]["time"] <= time.time()
    assert ledger.records("committed") == [{"time": 5.0, "event": "committed", "step": 10, "generation": 1}]


def test_failures_are_read_back_unchanged(ledger: Ledger) -> None:
    ledger.append_record({"time": 7.0, "event": "failure", "cause": "hang", "step": 3, "message": "stuck"})
    assert ledger.failures() == [Failure(FailureCause.HANG, 3, 7.0, "stuck")]


@pytest.mark.parametrize("cause", list(FailureCause))
def test_every_cause_has_a_counter(ledger: Ledger, cause: FailureCause) -> None:
    assert ledger.restarts() == dict.fromkeys(COUNTED_CAUSES, 0)
    for _ in range(2):
        ledger.append("failure", cause=str(cause), step=1, message="")
    counted = {name: count for name, count in ledger.restarts().items() if count}
    same = {
        FailureCause.DATA: "appError",
        FailureCause.COMMUNICATION: "workerLost",
        FailureCause.INFRASTRUCTURE: "workerLost",
    }
    assert counted == {same.get(cause, str(cause)): 2}


def test_lost_steps_and_worker_seconds_are_summed_over_generations(ledger: Ledger) -> None:
    assert (ledger.steps_lost(), ledger.worker_seconds()) == (0, 0.0)
    for generation, lost in ((1, 0), (2, 4), (3, 1)):
        ledger.append("generation-started", generation=generation, stepsLost=lost)
    ledger.append("generation-ended", generation=1, worldSize=2, seconds=30.0)
    ledger.append("generation-ended", generation=2, worldSize=3, seconds=10.5)
    assert ledger.steps_lost() == 5
    assert ledger.worker_seconds() == pytest.approx(91.5)


def test_failures_before_a_change_do_not_count_whatever_the_clocks_say(ledger: Ledger) -> None:
    """Another head may have a clock of its own."""

    def fail(at: float, message: str) -> None:
        ledger.append_record({"time": at, "event": "failure", "cause": "appError", "step": 0, "message": message})

    fail(5000.0, "before")
    ledger.append_record({"time": 4000.0, "event": "job-changed", "fields": ["spec.training"]})
    assert ledger.failures_since_change() == []
    fail(3000.0, "after")
    assert [failure.message for failure in ledger.failures_since_change()] == ["after"]
