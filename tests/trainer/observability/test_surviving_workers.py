"""Workers whose driver was lost are shown to train while their heartbeat goes on, and only then."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.surviving_workers import WORKERS_TRAIN_ON, SurvivingWorkers

STARTING = {"phase": "Starting", "generation": 2, "step": 75, "message": None}
LOOKING = {"phase": "WaitingForWorkers", "generation": 2, "step": 75, "adopting": True, "message": "looking"}


class Watched:
    """A job whose workers are watched, and the time."""

    def __init__(self, root: Path) -> None:
        self.directory = JobDirectory(root)
        self.now = 0.0
        self.workers = SurvivingWorkers(self.directory, lambda: self.now)

    def beat(self, heartbeat: int, generation: int = 2, **fields: Any) -> None:
        """Write what the ranks report."""
        times = {"time": 1.0, "startedAt": 1.0, "part": "productive", "seconds": {}, "startup": {"engine": 1.0}}
        progress = {**times, "heartbeat": heartbeat, "phase": "Training", "step": heartbeat, **fields}
        files.write_json(self.directory.generation_logs(generation).progress, progress)

    def shown(self, status: dict[str, Any], after: float = 0.5, age: float = 0.1) -> dict[str, Any]:
        """What is shown of a status, some seconds later."""
        self.now += after
        return self.workers.shown(dict(status), age)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    watched = Watched(tmp_path)
    watched.directory.generation_logs(2).root.mkdir(parents=True)
    watched.directory.generation_logs(3).root.mkdir()
    return watched


@pytest.mark.parametrize("status", [STARTING, LOOKING])
def test_workers_whose_heartbeat_goes_on_train(watched: Watched, status: dict[str, Any]) -> None:
    watched.beat(100)
    assert watched.shown(status) == {**status, "step": 100}, "they may have been lost with the head"
    watched.beat(101, loss=1.5)
    found = watched.shown(status)
    assert (found["phase"], found["step"], found["loss"], found["generation"]) == ("Training", 101, 1.5, 2)
    assert (found["message"], found["adopting"]) == (WORKERS_TRAIN_ON, True)
    assert found["ageSeconds"] == found["silentSeconds"] == 0
    assert not {"heartbeat", "startup", "seconds", "part"} & found.keys()
    assert watched.shown(status, after=1.0)["silentSeconds"] == 1.0


@pytest.mark.parametrize(("usual", "limit"), [(None, 15.0), (0.5, 4.0), (10.0, 22.0)])
def test_workers_that_fall_silent_are_not_shown(watched: Watched, usual: float | None, limit: float) -> None:
    watched.beat(100)
    watched.shown(STARTING)
    watched.beat(101, heartbeatSeconds=usual)
    assert watched.shown(STARTING)["phase"] == "Training"
    assert watched.shown(STARTING, after=limit)["phase"] == "Training"
    assert watched.shown(STARTING, after=0.1) == {**STARTING, "step": 101}


def test_status_does_not_go_back_when_one_head_after_another_is_lost(watched: Watched) -> None:
    watched.beat(100, epoch=1.5)
    watched.shown(STARTING)
    watched.beat(170, epoch=2.5)
    assert watched.shown(STARTING)["step"] == 170
    next_head = SurvivingWorkers(watched.directory, lambda: watched.now)
    found = next_head.shown(dict(STARTING), 0.1)
    assert (found["phase"], found["step"], found["epoch"]) == ("Starting", 170, 2.5)


def test_workers_may_lose_their_head_before_their_first_step(watched: Watched) -> None:
    """Their report has no step then."""
    path = watched.directory.generation_logs(2).progress
    starting = {"time": 1.0, "startedAt": 1.0, "part": "startup", "seconds": {}, "startup": {}, "phase": "Loading"}
    files.write_json(path, {**starting, "heartbeat": 1})
    assert watched.shown(STARTING) == STARTING, "they may have been lost with the head"
    files.write_json(path, {**starting, "heartbeat": 2})
    assert (watched.shown(STARTING)["phase"], watched.shown(STARTING)["step"]) == ("Loading", 75)
    assert watched.shown(STARTING, after=60.0) == STARTING


def test_heartbeats_before_the_loss_of_the_driver_prove_nothing(watched: Watched) -> None:
    watched.beat(100)
    watched.shown({**STARTING, "phase": "Training"})
    watched.beat(101)
    for _ in range(2):
        assert watched.shown(STARTING)["phase"] == "Starting"


def test_driver_that_knows_its_workers_is_believed(watched: Watched) -> None:
    for phase in ("Training", "Loading", "WaitingForWorkers", "Failed", "Done"):
        status = {**STARTING, "phase": phase}
        for heartbeat in range(3):
            watched.beat(heartbeat)
            assert watched.shown(status) == status


def test_status_of_a_driver_before_this_supervisor_is_not_the_last_word(watched: Watched) -> None:
    """A new head checks the volume and waits for Ray first."""
    left = {**STARTING, "phase": "Training", "message": None}
    watched.beat(100)
    assert watched.shown(left, age=30.0) == {**left, "step": 100}
    watched.beat(160)
    assert watched.shown(left, age=31.0)["message"] == WORKERS_TRAIN_ON


def test_another_generation_has_heartbeats_of_its_own(watched: Watched) -> None:
    watched.beat(100)
    watched.shown(STARTING)
    watched.beat(5, generation=3)
    later = {**STARTING, "generation": 3}
    assert watched.shown(later) == later


def test_job_without_workers_is_shown_as_it_is(watched: Watched) -> None:
    for status in ({"phase": "Starting"}, {"phase": "Starting", "generation": 7}):
        assert watched.shown(status) == status


def test_real_clock_is_used(tmp_path: Path) -> None:
    workers = SurvivingWorkers(JobDirectory(tmp_path))
    fresh = {"phase": "Training", "generation": 1, "time": time.time()}
    assert workers.shown(fresh, 0.0) == fresh
