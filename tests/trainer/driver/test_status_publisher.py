"""What the driver publishes: `status.json`, events of the ledger, and tracker curves without duplicate points."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spotune_trainer import files
from spotune_trainer.driver.status_publisher import StatusPublisher
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.progress import ProgressReporter, StepRecord
from spotune_trainer.observability.tracking.tracker import TensorBoardTracker

KEYS = {
    *("time", "heartbeat", "phase", "generation", "attempt", "step", "totalSteps", "epoch", "loss", "learningRate"),
    *("gradNorm", "evalLoss", "tokensPerSecond", "samplesPerSecond", "mfu", "etaSeconds", "workers", "lastCheckpoint"),
    *("resumedFromStep", "stepsLost", "restarts", "message", "startup", "silentSeconds", "checkpointProblem"),
    *("heartbeatSeconds", "dataLeftOut", "adopting", "ownSeconds", "slowestRanks", "stragglers", "unfitNodes"),
    *("skippedSteps", "evalScores", "evalStep", "evalBySource", "best", "stoppedEarly", "exportProblem", "exportStep"),
    "harnessProblem",
    *("goodput", "goodputParts"),
}


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path)


@pytest.fixture
def publisher(directory: JobDirectory) -> Iterator[StatusPublisher]:
    tracker = TensorBoardTracker(directory.tensorboard)
    with StatusPublisher(directory, Ledger(directory), attempt=2, trackers=[tracker]) as publisher:
        yield publisher


def status(directory: JobDirectory) -> dict[str, Any]:
    value = files.read_json(directory.status)
    assert isinstance(value, dict)
    return value


def step_record(generation: int, step: int) -> StepRecord:
    return StepRecord(
        generation=generation,
        step=step,
        epoch=step / 5,
        loss=10.0 * generation + step,
        gradNorm=1.0,
        skipped=False,
        learningRate=1e-3,
        tokens=100,
        labelTokens=60,
        seconds=0.5,
        productiveSeconds=0.4,
        dataWaitSeconds=0.1,
        worldSize=2,
        samples="00000000000000ff",
        mfu=None,
    )


def train(directory: JobDirectory, generation: int, first: int, last: int) -> None:
    """Write the files that the workers of a generation write while they train from `first` to `last`."""
    with ProgressReporter(directory.generation_logs(generation), 0, 60) as reporter:
        reporter.set_phase(Phase.TRAINING)
        for step in range(first, last + 1):
            reporter.record_step(step_record(generation, step), samples=16, total_steps=10)
            reporter.heartbeat()


def points(directory: JobDirectory, curve: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(directory.tensorboard), purge_orphaned_data=True)
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(curve)]


def test_first_status_has_every_field(directory: JobDirectory, publisher: StatusPublisher) -> None:
    found = status(directory)
    assert found.keys() == KEYS
    assert (found["phase"], found["attempt"], found["step"]) == ("Preparing", 2, None)
    assert found["workers"] == {"running": 0, "wanted": 0}
    assert set(found["restarts"].values()) == {0}


def test_progress_of_the_workers_is_published(directory: JobDirectory, publisher: StatusPublisher) -> None:
    publisher.start_generation(generation=4, first_step=2, workers=2)
    publisher.refresh()
    loading = status(directory)
    assert (loading["phase"], loading["step"], loading["resumedFromStep"]) == ("Loading", 2, 2)
    assert loading["workers"] == {"running": 0, "wanted": 2}
    train(directory, 4, first=3, last=6)
    publisher.refresh()
    training = status(directory)
    assert training.keys() == KEYS
    assert (training["phase"], training["generation"], training["step"]) == ("Training", 4, 6)
    assert (training["totalSteps"], training["loss"], training["tokensPerSecond"]) == (10, 46.0, 200.0)
    assert training["workers"] == {"running": 2, "wanted": 2}
    publisher.finish_generation()
    publisher.refresh()
    assert status(directory)["workers"] == {"running": 0, "wanted": 2}


def test_a_group_that_goes_back_shows_no_loss_until_its_first_step(
    directory: JobDirectory, publisher: StatusPublisher
) -> None:
    publisher.start_generation(generation=1, first_step=0, workers=2)
    train(directory, 1, first=1, last=6)
    publisher.finish_generation()
    publisher.start_generation(generation=2, first_step=6, workers=2)  # nothing was lost: the loss is of this step
    publisher.refresh()
    assert (status(directory)["step"], status(directory)["loss"]) == (6, 16.0)
    publisher.start_generation(generation=3, first_step=4, workers=2)
    publisher.refresh()
    loading = status(directory)
    assert (loading["step"], loading["loss"], loading["epoch"], loading["etaSeconds"]) == (4, None, None, None)
    train(directory, 3, first=5, last=5)
    publisher.refresh()
    assert (status(directory)["step"], status(directory)["loss"]) == (5, 35.0)


def test_a_group_that_starts_again_from_the_beginning_says_so(
    directory: JobDirectory, publisher: StatusPublisher
) -> None:
    publisher.start_generation(generation=1, first_step=6, workers=2)
    publisher.start_generation(generation=2, first_step=0, workers=2)
    publisher.refresh()
    assert status(directory)["resumedFromStep"] == 0, "None would say that it is not known"


def test_no_event_is_lost_while_the_volume_is_full(directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = StatusPublisher(directory, Ledger(directory), 1, [])
    publisher.start_generation(generation=1, first_step=0, workers=2)
    train(directory, 1, first=1, last=2)
    for step in (1, 2):
        files.append_json(directory.generation_logs(1).events, {"time": step, "event": "committed", "step": step})
    full = pytest.raises(OSError, match="No space left")
    with monkeypatch.context() as patch, full:
        patch.setattr(Ledger, "append_record", Mock(side_effect=OSError(28, "No space left on device")))
        publisher.refresh()
    publisher.refresh()
    assert [record["step"] for record in Ledger(directory).records("committed")] == [1, 2]


def test_a_bug_in_one_refresh_does_not_end_the_others(directory: JobDirectory) -> None:
    tracker = Mock()
    tracker.log_step.side_effect = [ZeroDivisionError("of a bug"), None, None]
    with StatusPublisher(directory, Ledger(directory), 1, [tracker]) as publisher:
        publisher.start_generation(generation=1, first_step=0, workers=2)
        train(directory, 1, first=1, last=1)
        until = time.monotonic() + 30
        while not tracker.log_step.called and time.monotonic() < until:
            time.sleep(0.1)
        train(directory, 1, first=2, last=2)
        while status(directory)["step"] != 2 and time.monotonic() < until:
            time.sleep(0.1)
        assert status(directory)["step"] == 2


def test_heartbeat_grows_only_with_progress(directory: JobDirectory, publisher: StatusPublisher) -> None:
    first = status(directory)["heartbeat"]
    for _ in range(3):
        publisher.refresh()
    assert status(directory)["heartbeat"] == first
    publisher.update(message="0 of 2 workers are there")
    waiting = status(directory)["heartbeat"]
    assert waiting > first
    publisher.start_generation(generation=1, first_step=0, workers=2)
    train(directory, 1, first=1, last=5)
    publisher.refresh()
    assert status(directory)["heartbeat"] > waiting


def test_heartbeat_never_decreases_across_generations_and_attempts(directory: JobDirectory) -> None:
    heartbeats = []
    for attempt in (1, 2):
        with StatusPublisher(directory, Ledger(directory), attempt, []) as publisher:
            heartbeats.append(status(directory)["heartbeat"])
            for generation in (2 * attempt, 2 * attempt + 1):
                publisher.start_generation(generation, first_step=0, workers=1)
                train(directory, generation, first=1, last=5)
                publisher.refresh()
                heartbeats.append(status(directory)["heartbeat"])
                publisher.finish_generation()
    assert heartbeats == sorted(set(heartbeats))


def test_new_attempt_keeps_step_and_loss(directory: JobDirectory) -> None:
    with StatusPublisher(directory, Ledger(directory), 1, []) as publisher:
        publisher.start_generation(1, first_step=0, workers=1)
        train(directory, 1, first=1, last=5)
        publisher.finish_generation()
    with StatusPublisher(directory, Ledger(directory), 2, []):
        found = status(directory)
    assert (found["attempt"], found["phase"], found["step"], found["loss"]) == (2, "Preparing", 5, 15.0)


def test_events_are_appended_to_the_ledger_once_with_their_generation(
    directory: JobDirectory, publisher: StatusPublisher
) -> None:
    publisher.start_generation(3, first_step=0, workers=1)
    with ProgressReporter(directory.generation_logs(3), 0, 60) as reporter:
        reporter.record_event("committed", step=5, checkpoint="step-00000005.gen-3")
        reporter.record_event("evaluated", step=5, loss=2.0, exactMatch=0.5, executionAccuracy=None)
    publisher.refresh()
    publisher.finish_generation()
    records = Ledger(directory).records()
    assert [(record["event"], record["generation"], record["step"]) for record in records] == [
        ("committed", 3, 5),
        ("evaluated", 3, 5),
    ]


def test_status_is_published_in_the_background(directory: JobDirectory, publisher: StatusPublisher) -> None:
    publisher.start_generation(1, first_step=0, workers=1)
    train(directory, 1, first=1, last=5)
    deadline = time.monotonic() + 60
    while status(directory)["step"] != 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_startup_times_of_driver_and_workers_are_merged(directory: JobDirectory, publisher: StatusPublisher) -> None:
    publisher.start_generation(1, first_step=0, workers=1)
    publisher.record_startup("plan", 1.23456)
    with ProgressReporter(directory.generation_logs(1), 0, 60) as reporter:
        reporter.record_startup("data")
    publisher.refresh()
    assert status(directory)["startup"].keys() >= {"plan", "data"}
    assert status(directory)["startup"]["plan"] == 1.235


def test_curve_has_every_step_once_after_a_rewind(directory: JobDirectory, publisher: StatusPublisher) -> None:
    """Generation 1 logs seven steps; generation 2 resumes after the fifth."""
    for generation, first_step, last in ((1, 0, 7), (2, 5, 9)):
        publisher.start_generation(generation, first_step, workers=2)
        train(directory, generation, first_step + 1, last)
        with ProgressReporter(directory.generation_logs(generation), 0, 60) as reporter:
            reporter.record_event(
                "evaluated", step=last, loss=float(generation), exactMatch=0.25, scores={"bleu": 41.5}
            )
            reporter.record_event("harness", step=last, scores={"arc_easy/acc": 0.5})
        publisher.finish_generation()
    publisher.__exit__()
    expected = [(step, 10.0 + step) for step in range(1, 6)] + [(step, 20.0 + step) for step in range(6, 10)]
    assert points(directory, "train/loss") == expected
    assert [step for step, _ in points(directory, "train/tokensPerSecond")] == list(range(1, 10))
    assert points(directory, "eval/loss") == [(9, 2.0)]
    assert points(directory, "eval/exactMatch") == [(9, 0.25)]
    assert points(directory, "eval/bleu") == [(9, 41.5)]
    assert points(directory, "harness/arc_easy/acc") == [(9, 0.5)]


class Recorder:
    """A tracker that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def rewind(self, step: int) -> None:
        self.calls.append(("rewind", step))

    def log_step(self, record: Mapping[str, Any]) -> None:
        self.calls.append(("step", record["step"]))

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        self.calls.append(("evaluated", record["step"]))

    def log_harness(self, record: Mapping[str, Any]) -> None:
        self.calls.append(("harness", record["step"]))

    def close(self, phase: Phase) -> None:
        self.calls.append((f"close {phase}", 0))


def test_trackers_receive_every_step_once_and_are_closed(directory: JobDirectory) -> None:
    recorder = Recorder()
    with StatusPublisher(directory, Ledger(directory), 1, [recorder]) as publisher:
        publisher.start_generation(1, first_step=0, workers=1)
        train(directory, 1, first=1, last=2)
        publisher.refresh()
        train(directory, 1, first=3, last=3)
        publisher.finish_generation()
    assert recorder.calls == [("rewind", 0), ("step", 1), ("step", 2), ("step", 3), ("close Training", 0)]
