"""The thread that sends points to a tracking server: every step once, and training never waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.tracking.remote import KINDS, Kind, Point, RemoteTracker, run_history
from tests.trainer.support.tracked_runs import feed, record
from tests.trainer.support.waiting import wait_until


class Memory:
    """A server in memory that a test can make unreachable."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.failures = 0
        self.phases: list[Phase] = []
        self.unreachable = threading.Event()

    def last_step(self, kind: Kind) -> int:
        return max((point.step for point in self.points if point.kind == kind), default=0)

    def log(self, points: Sequence[Point]) -> None:
        if self.unreachable.is_set():
            self.failures += 1
            raise ConnectionError("no route to host")
        self.points += points

    def close(self, phase: Phase) -> None:
        self.phases.append(phase)


def test_a_server_gets_the_points_of_an_outage_once(directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotune_trainer.observability.tracking.remote._BACKOFF_SECONDS", (0.01, 0.02))
    service, generation = Memory(), claim(directory, None).number
    tracker = RemoteTracker("memory", lambda: service, lambda: run_history(directory), send_every_seconds=0.01)
    tracker.rewind(0)
    feed(tracker, directory, generation, range(1, 4))
    assert wait_until(lambda: service.last_step("step") == 3 and service.last_step("evalStep") == 3, 60)
    service.unreachable.set()
    feed(tracker, directory, generation, range(4, 8))
    assert wait_until(lambda: service.failures > 2, 60)
    assert service.last_step("step") == 3
    service.unreachable.clear()
    assert wait_until(lambda: service.last_step("step") == 7, 60)
    tracker.log_harness({"step": 6, "scores": {"arc_easy/acc": 0.5}})
    tracker.close(Phase.DONE)
    expected = {"step": [1, 2, 3, 4, 5, 6, 7], "evalStep": [3, 6], "harnessStep": [6]}
    assert {kind: [point.step for point in service.points if point.kind == kind] for kind in KINDS} == expected
    assert service.points[-1].values == {"harness/arc_easy/acc": 0.5}
    assert service.phases == [Phase.DONE]


def test_training_does_not_wait_for_a_server_that_does_not_respond(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spotune_trainer.observability.tracking.remote._FINAL_TIMEOUT_SECONDS", 0.05)
    forever = threading.Event()

    def connect() -> Memory:
        forever.wait()
        return Memory()

    tracker = RemoteTracker("memory", connect, lambda: run_history(directory))
    tracker.rewind(0)
    for step in range(1, 1000):
        tracker.log_step(record(step))
    tracker.close(Phase.DONE)
    assert "memory did not accept the last points" in caplog.text
    forever.set()
