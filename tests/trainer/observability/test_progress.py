"""What a worker tells the world, and that a hang ends it."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spotune_trainer import files
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.observability.progress import Journal, Phase, StepRecord
from spotune_trainer.worker_group.rank_process import has_hung

HANG = """
import sys, threading
from pathlib import Path
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.worker_group.rank_process import has_hung
from spotune_trainer.observability.progress import Journal

def wait_for_a_lock_that_nobody_gives_back():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

with Journal(GenerationLogs(Path(sys.argv[1])), 3, hang_timeout_seconds=0.5) as journal:
    journal.beat()
    wait_for_a_lock_that_nobody_gives_back()
"""
SLOW_BUT_ALIVE = """
import sys, time
from pathlib import Path
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.worker_group.rank_process import has_hung
from spotune_trainer.observability.progress import Journal

with Journal(GenerationLogs(Path(sys.argv[1])), 0, hang_timeout_seconds=1.0) as journal:
    for _ in range(8):
        time.sleep(0.2)
        journal.beat()
time.sleep(1.2)
print("done")
"""
STEP = StepRecord(
    generation=1,
    step=3,
    epoch=0.6,
    loss=2.5,
    gradNorm=1.0,
    skipped=False,
    learningRate=1e-3,
    tokens=200,
    seconds=0.5,
    productiveSeconds=0.4,
    worldSize=2,
    samples="00000000000000ff",
    mfu=None,
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def logs(tmp_path: Path) -> GenerationLogs:
    return GenerationLogs(tmp_path / "gen-1")


def progress(logs: GenerationLogs, journal: Journal | None = None) -> dict[str, Any]:
    """What is in the file, once a journal that is still open has written what it was told."""
    if journal is not None:
        journal.sync()
    value = files.read_json(logs.progress)
    assert isinstance(value, dict)
    return value


def python(program: str, logs: GenerationLogs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, str(logs.root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_hung_process_is_ended_with_its_stacks_written(logs: GenerationLogs) -> None:
    assert python(HANG, logs).returncode == 1
    stacks = logs.stacks(3).read_text()
    assert "Timeout" in stacks
    assert "wait_for_a_lock_that_nobody_gives_back" in stacks
    assert has_hung(logs, 3)


def test_a_slow_process_that_beats_lives_and_nothing_guards_it_afterwards(logs: GenerationLogs) -> None:
    ended = python(SLOW_BUT_ALIVE, logs)
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert not has_hung(logs, 3)


def test_the_heartbeat_grows_with_every_beat_and_is_written_now_and_then(logs: GenerationLogs) -> None:
    clock = Clock()
    with Journal(logs, 0, 60, clock) as journal:
        assert progress(logs, journal)["heartbeat"] == 1
        for _ in range(10):
            journal.beat()
        assert progress(logs, journal)["heartbeat"] == 1
        clock.now += 0.6
        journal.beat()
        assert progress(logs, journal)["heartbeat"] == 12
        journal.beat()
    assert progress(logs)["heartbeat"] == 13


def test_what_is_published_is_no_beat(logs: GenerationLogs) -> None:
    clock = Clock()
    with Journal(logs, 0, 60, clock) as journal:
        journal.set(checkpointProblem="the volume is full")
        journal.publish()
        assert "checkpointProblem" not in progress(logs, journal)
        clock.now += 0.6
        journal.publish()
        assert (progress(logs, journal)["checkpointProblem"], progress(logs, journal)["heartbeat"]) == (
            "the volume is full",
            1,
        )


def test_a_phase_is_written_at_once(logs: GenerationLogs) -> None:
    with Journal(logs, 0, 60, Clock()) as journal:
        assert progress(logs, journal)["phase"] == "Loading"
        journal.enter(Phase.EVALUATING)
        assert progress(logs, journal)["phase"] == "Evaluating"


def test_parts_of_the_start_up_count_from_one_another(logs: GenerationLogs) -> None:
    clock = Clock()
    with Journal(logs, 0, 60, clock) as journal:
        clock.now += 2.5
        journal.started("model")
        clock.now += 1.25
        journal.started("engine")
    assert progress(logs)["startup"] == {"model": 2.5, "engine": 1.25}


def test_a_step_is_a_line_and_the_rates_are_over_the_last_steps(logs: GenerationLogs) -> None:
    with Journal(logs, 0, 60, Clock()) as journal:
        journal.step(STEP, samples=16, total_steps=10)
    assert list(files.read_lines(logs.steps)) == [STEP.__dict__]
    found = progress(logs)
    assert (found["step"], found["totalSteps"], found["epoch"], found["loss"]) == (3, 10, 0.6, 2.5)
    assert (found["tokensPerSecond"], found["samplesPerSecond"]) == (400.0, 32.0)
    assert found["etaSeconds"] == 3.5


def test_events_carry_their_time(logs: GenerationLogs) -> None:
    with Journal(logs, 0, 60, Clock()) as journal:
        journal.event("committed", step=5)
    (event,) = files.read_lines(logs.events)
    assert (event["event"], event["step"]) == ("committed", 5)
    assert event["time"] > 1.6e9


def test_other_ranks_guard_themselves_and_write_nothing(logs: GenerationLogs) -> None:
    with Journal(logs, 1, 60, Clock()) as journal:
        journal.enter(Phase.TRAINING)
        journal.step(STEP, samples=16, total_steps=10)
        journal.event("committed", step=5)
        journal.sync()
    assert [path.name for path in logs.root.iterdir()] == ["stacks-rank-00001.txt"]


def test_steps_are_on_the_disk_before_a_commit(logs: GenerationLogs) -> None:
    with Journal(logs, 0, 60, Clock()) as journal:
        journal.sync()
        journal.step(STEP, samples=16, total_steps=10)
        journal.sync()
    assert len(list(files.read_lines(logs.steps))) == 1


def test_a_volume_that_takes_nothing_gets_every_step_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = GenerationLogs(tmp_path)
    real = files.append_json

    def refuse(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with Journal(logs, 0, hang_timeout_seconds=600) as journal:
        journal.step(STEP, samples=16, total_steps=10)
        monkeypatch.setattr(files, "append_json", refuse)
        journal.step(dataclasses.replace(STEP, step=4), samples=16, total_steps=10)
        journal.event("restored", step=3)
        with pytest.raises(OSError, match="could not be written yet"):
            journal.sync()
        monkeypatch.setattr(files, "append_json", real)
        journal.step(dataclasses.replace(STEP, step=5), samples=16, total_steps=10)
        journal.sync()
    assert [line["step"] for line in files.read_lines(logs.steps)] == [3, 4, 5]
    assert [line["event"] for line in files.read_lines(logs.events)] == ["restored"]
