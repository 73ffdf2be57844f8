"""Goodput of a job from what is on its volume: the ledger, and the files of generations that nobody saw end."""

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
from spotune_trainer.observability.goodput_ledger import GoodputAccount, record_end, record_lost_ends, seconds_lost
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
    lost = seconds_lost(directory, name.step if name else 0)
    generation = claim(directory, name)
    event = {"time": at, "event": "generation-started", "generation": generation.number}
    ledger.append_record({**event, "secondsLost": lost, "worldSize": 2})
    return generation.number


def train(directory: JobDirectory, generation: int, first: int, last: int, began: float, **seconds: float) -> None:
    """What rank 0 leaves behind that is killed after some steps of two seconds each."""
    logs = directory.generation_logs(generation)
    logs.root.mkdir(parents=True)
    for step in range(first, last + 1):
        files.append_json(logs.steps, {"step": step, "productiveSeconds": 2.0})
    progress: dict[str, Any] = {"startedAt": began, "seconds": seconds, "part": "productive"}
    files.write_json(logs.progress, {**progress, "time": began + sum(seconds.values())})


def parts(account: dict[str, Any]) -> dict[str, float]:
    """Seconds of the parts that took any."""
    return {part: value for part, value in account["goodputParts"].items() if value}


def test_a_generation_that_nobody_saw_end_lived_until_its_last_sign(directory: JobDirectory, ledger: Ledger) -> None:
    ledger.append_record({"time": 1000.0, "event": "attempt-started", "attempt": 1})
    generation = start(ledger, directory, at=1005.0)
    train(directory, generation, 1, 10, began=1010.0, startup=4.0, productive=21.0, dataWait=1.0)
    ledger.append_record({"time": 1200.0, "event": "attempt-ended", "exitCode": None, "lastSeen": 1035.5})
    ledger.append_record({"time": 1200.0, "event": "attempt-started", "attempt": 2})
    for _ in range(2):
        record_lost_ends(ledger, directory)
    (ended,) = ledger.records("generation-ended")
    assert (ended["seconds"], ended["steps"], ended["worldSize"]) == (31.0, 10, 2)
    assert ended["parts"] == {"productive": 20.0, "dataWait": 1.0, "lost": 1.0, "startup": 9.0}
    start(ledger, directory, at=1210.0, restored="step-00000007.gen-1")
    account = GoodputAccount(directory).figures(1210.0)
    assert parts(account) == {"productive": 14.0, "dataWait": 1.0, "lost": 7.0, "startup": 24.0, "waiting": 164.0}
    assert account["goodput"] == round(14 / 210, 4)


def test_work_of_several_generations_may_be_rolled_back(directory: JobDirectory, ledger: Ledger) -> None:
    """The third starts from a checkpoint of the first, which the second had gone past and the first, too."""
    ledger.append_record({"time": 1000.0, "event": "attempt-started", "attempt": 1})
    train(directory, start(ledger, directory, at=1000.0), 1, 8, began=1000.0, productive=16.0)
    record_end(ledger, directory, 1, 1016.0, failed=True)
    train(directory, start(ledger, directory, at=1016.0, restored="step-00000006.gen-1"), 7, 9, 1016.0, productive=6.0)
    record_end(ledger, directory, 2, 1022.0, failed=True)
    start(ledger, directory, at=1022.0, restored="step-00000005.gen-1")
    assert [record["secondsLost"] for record in ledger.records("generation-started")] == [0.0, 4.0, 8.0]
    assert parts(GoodputAccount(directory).figures(1022.0)) == {"productive": 10.0, "lost": 12.0}


def test_what_runs_is_productive_until_it_is_known_better(directory: JobDirectory, ledger: Ledger) -> None:
    ledger.append_record({"time": 1000.0, "event": "attempt-started", "attempt": 1})
    account = GoodputAccount(directory)
    assert parts(account.figures(1002.0)) == {"startup": 2.0}
    generation = start(ledger, directory, at=1004.0)
    train(directory, generation, 1, 3, began=1005.0, startup=1.0, productive=6.5)
    progress = files.read_json(directory.generation_logs(generation).progress)
    assert parts(account.figures(1013.0, progress)) == {"startup": 6.0, "productive": 7.0}
    record_end(ledger, directory, generation, 1014.0, failed=True)
    assert parts(account.figures(1014.0, progress)) == {"startup": 6.0, "productive": 6.0, "lost": 2.0}


def test_a_worker_accounts_for_all_of_its_time(runs: Runs) -> None:
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


def test_reading_goes_on_where_it_was(directory: JobDirectory, ledger: Ledger) -> None:
    account = GoodputAccount(directory)
    assert account.figures(time.time()) == {"goodput": None, "goodputParts": dict.fromkeys(_names(account), 0.0)}
    ledger.append_record({"time": 1000.0, "event": "attempt-started", "attempt": 1})
    ledger.append_record({"time": 1010.0, "event": "waiting", "slots": 0, "wanted": 2})
    assert parts(account.figures(1015.0)) == {"startup": 10.0, "waiting": 5.0}
    ledger.append_record({"time": 1020.0, "event": "stopped"})
    assert parts(account.figures(1100.0)) == {"startup": 10.0, "waiting": 10.0, "stopped": 80.0}


def _names(account: GoodputAccount) -> list[str]:
    return list(account.figures(0.0)["goodputParts"])
