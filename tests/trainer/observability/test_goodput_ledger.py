"""Goodput of a job from its volume: the ledger, and the files of generations whose end was not recorded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from spotune_trainer import files
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.goodput_ledger import (
    GoodputMeter,
    productive_seconds_after,
    record_generation_ended,
    record_lost_generations,
)
from tests.trainer.support.runs import STEPS, Layout, Runs


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path)


@pytest.fixture
def ledger(directory: JobDirectory) -> Ledger:
    return Ledger(directory)


def start(ledger: Ledger, directory: JobDirectory, at: float, restored: str | None = None) -> int:
    """A driver starts the next generation."""
    name = CheckpointName.parse(restored) if restored else None
    lost = productive_seconds_after(directory, name.step if name else 0)
    generation = claim(directory, name)
    event = {"time": at, "event": "generation-started", "generation": generation.number}
    ledger.append_record({**event, "secondsLost": lost, "worldSize": 2})
    return generation.number


def train(directory: JobDirectory, generation: int, first: int, last: int, began: float, **seconds: float) -> None:
    """The files that rank 0 leaves if it is killed after some steps of two seconds each."""
    logs = directory.generation_logs(generation)
    logs.root.mkdir(parents=True)
    for step in range(first, last + 1):
        files.append_json(logs.steps, {"step": step, "productiveSeconds": 2.0})
    progress: dict[str, Any] = {"startedAt": began, "seconds": seconds, "part": "productive"}
    files.write_json(logs.progress, {**progress, "time": began + sum(seconds.values())})


def parts(metrics: dict[str, Any]) -> dict[str, float]:
    """Seconds of the parts that took any."""
    return {part: value for part, value in metrics["goodputParts"].items() if value}


def test_a_generation_without_a_recorded_end_lasted_until_its_last_sign_of_life(
    directory: JobDirectory, ledger: Ledger
) -> None:
    ledger.append_record({"time": 1000.0, "event": "attempt-started", "attempt": 1})
    generation = start(ledger, directory, at=1005.0)
    train(directory, generation, 1, 10, began=1010.0, startup=4.0, productive=21.0, dataWait=1.0)
    ledger.append_record({"time": 1200.0, "event": "attempt-ended", "exitCode": None, "lastSeen": 1035.5})
    ledger.append_record({"time": 1200.0, "event": "attempt-started", "attempt": 2})
    for _ in range(2):
        record_lost_generations(ledger, directory)
    (ended,) = ledger.records("generation-ended")
    assert (ended["seconds"], ended["steps"], ended["worldSize"]) == (31.0, 10, 2)
    assert ended["parts"] == {"productive": 20.0, "dataWait": 1.0, "lost": 1.0, "startup": 9.0}
    start(ledger, directory, at=1210.0, restored="step-00000007.gen-1")
    metrics = GoodputMeter(directory).metrics(1210.0)
    assert parts(metrics) == {"productive": 14.0, "dataWait": 1.0, "lost": 7.0, "startup": 24.0, "waiting": 164.0}
    assert metrics["goodput"] == round(14 / 210, 4)


def test_work_of_several_generations_may_be_rolled_back(directory: JobDirectory, ledger: Ledger) -> None:
    """The third starts from a checkpoint of the first that is older than what the second started from."""
    ledger.append_record({"time": 1000.0, "event": "attempt-started", "attempt": 1})
    train(directory, start(ledger, directory, at=1000.0), 1, 8, began=1000.0, productive=16.0)
    record_generation_ended(ledger, directory, 1, 1016.0, failed=True)
    train(directory, start(ledger, directory, at=1016.0, restored="step-00000006.gen-1"), 7, 9, 1016.0, productive=6.0)
    record_generation_ended(ledger, directory, 2, 1022.0, failed=True)
    start(ledger, directory, at=1022.0, restored="step-00000005.gen-1")
    assert [record["secondsLost"] for record in ledger.records("generation-started")] == [0.0, 4.0, 8.0]
    assert parts(GoodputMeter(directory).metrics(1022.0)) == {"productive": 10.0, "lost": 12.0}


def test_a_running_step_is_productive_until_its_generation_fails(directory: JobDirectory, ledger: Ledger) -> None:
    ledger.append_record({"time": 1000.0, "event": "attempt-started", "attempt": 1})
    meter = GoodputMeter(directory)
    assert parts(meter.metrics(1002.0)) == {"startup": 2.0}
    generation = start(ledger, directory, at=1004.0)
    train(directory, generation, 1, 3, began=1005.0, startup=1.0, productive=6.5)
    progress = files.read_json(directory.generation_logs(generation).progress)
    assert parts(meter.metrics(1013.0, progress)) == {"startup": 6.0, "productive": 7.0}
    record_generation_ended(ledger, directory, generation, 1014.0, failed=True)
    assert parts(meter.metrics(1014.0, progress)) == {"startup": 6.0, "productive": 6.0, "lost": 2.0}


@pytest.mark.slow
def test_the_parts_of_a_worker_sum_to_its_time(runs: Runs) -> None:
    run = runs.finished(Layout(2, 1))
    logs = run.generation_logs(1)
    progress = files.read_json(logs.progress)
    assert progress is not None
    seconds = progress["seconds"]
    assert seconds.keys() >= {"startup", "productive", "dataWait", "checkpointStall", "evaluation"}
    assert sum(seconds.values()) == pytest.approx(progress["time"] - progress["startedAt"], abs=0.5)
    steps = list(files.read_lines(logs.steps))
    assert len(steps) == STEPS
    assert 0 < sum(step["productiveSeconds"] for step in steps) <= seconds["productive"] + 0.01
    assert all(step["productiveSeconds"] <= step["seconds"] + 0.01 for step in steps)


def test_only_new_events_are_read(directory: JobDirectory, ledger: Ledger) -> None:
    meter = GoodputMeter(directory)
    assert meter.metrics(time.time()) == {"goodput": None, "goodputParts": dict.fromkeys(_names(meter), 0.0)}
    ledger.append_record({"time": 1000.0, "event": "attempt-started", "attempt": 1})
    ledger.append_record({"time": 1010.0, "event": "waiting", "slots": 0, "wanted": 2})
    assert parts(meter.metrics(1015.0)) == {"startup": 10.0, "waiting": 5.0}
    ledger.append_record({"time": 1020.0, "event": "stopped"})
    assert parts(meter.metrics(1100.0)) == {"startup": 10.0, "waiting": 10.0, "stopped": 80.0}


def _names(meter: GoodputMeter) -> list[str]:
    return list(meter.metrics(0.0)["goodputParts"])
