"""A worker's progress reports, and the watchdog that ends a hung worker."""

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
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.progress import ProgressReporter, StepRecord
from spotune_trainer.worker_group.rank_process import has_hung

HANG = """
import sys, threading
from pathlib import Path
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.worker_group.rank_process import has_hung
from spotune_trainer.observability.progress import ProgressReporter

def wait_for_a_lock_that_is_never_released():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

with ProgressReporter(GenerationLogs(Path(sys.argv[1])), 3, hang_timeout_seconds=0.5) as reporter:
    reporter.heartbeat()
    wait_for_a_lock_that_is_never_released()
"""
SLOW_BUT_ALIVE = """
import sys, time
from pathlib import Path
from spotune_trainer.job_directory.layout import GenerationLogs
from spotune_trainer.worker_group.rank_process import has_hung
from spotune_trainer.observability.progress import ProgressReporter

with ProgressReporter(GenerationLogs(Path(sys.argv[1])), 0, hang_timeout_seconds=4.0) as reporter:
    for _ in range(4):
        time.sleep(1.1)
        reporter.heartbeat()
time.sleep(4.2)
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
    labelTokens=120,
    seconds=0.8,
    productiveSeconds=0.4,
    dataWaitSeconds=0.1,
    worldSize=2,
    samples="00000000000000ff",
    mfu=None,
)


class Clock:
    """Seconds that a test advances by hand."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def logs(tmp_path: Path) -> GenerationLogs:
    return GenerationLogs(tmp_path / "gen-1")


def progress(logs: GenerationLogs, reporter: ProgressReporter | None = None) -> dict[str, Any]:
    """The content of `progress.json`; a reporter that is still open writes everything first."""
    if reporter is not None:
        reporter.sync()
    value = files.read_json(logs.progress)
    assert isinstance(value, dict)
    return value


def python(program: str, logs: GenerationLogs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, str(logs.root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_watchdog_ends_a_hung_process_and_writes_its_stacks(logs: GenerationLogs) -> None:
    assert python(HANG, logs).returncode == 1
    stacks = logs.stacks(3).read_text()
    assert "Timeout" in stacks
    assert "wait_for_a_lock_that_is_never_released" in stacks
    assert has_hung(logs, 3)


def test_heartbeats_keep_a_slow_process_alive_and_the_watchdog_ends_with_its_context(logs: GenerationLogs) -> None:
    ended = python(SLOW_BUT_ALIVE, logs)
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert not has_hung(logs, 3)


def test_every_heartbeat_counts_but_only_due_ones_are_written(logs: GenerationLogs) -> None:
    clock = Clock()
    with ProgressReporter(logs, 0, 60, clock) as reporter:
        assert progress(logs, reporter)["heartbeat"] == 1
        for _ in range(10):
            reporter.heartbeat()
        assert progress(logs, reporter)["heartbeat"] == 1
        clock.now += 0.6
        reporter.heartbeat()
        assert progress(logs, reporter)["heartbeat"] == 12
        reporter.heartbeat()
    assert progress(logs)["heartbeat"] == 13


def test_writing_when_due_is_no_heartbeat(logs: GenerationLogs) -> None:
    clock = Clock()
    with ProgressReporter(logs, 0, 60, clock) as reporter:
        reporter.update(checkpointProblem="the volume is full")
        reporter.write_if_due()
        assert "checkpointProblem" not in progress(logs, reporter)
        clock.now += 0.6
        reporter.write_if_due()
        assert (progress(logs, reporter)["checkpointProblem"], progress(logs, reporter)["heartbeat"]) == (
            "the volume is full",
            1,
        )


def test_a_phase_is_written_at_once(logs: GenerationLogs) -> None:
    with ProgressReporter(logs, 0, 60, Clock()) as reporter:
        assert progress(logs, reporter)["phase"] == "Loading"
        reporter.set_phase(Phase.EVALUATING)
        assert progress(logs, reporter)["phase"] == "Evaluating"


def test_each_startup_part_counts_from_the_end_of_the_previous_one(logs: GenerationLogs) -> None:
    clock = Clock()
    with ProgressReporter(logs, 0, 60, clock) as reporter:
        clock.now += 2.5
        reporter.record_startup("model")
        clock.now += 1.25
        reporter.record_startup("engine")
    assert progress(logs)["startup"] == {"model": 2.5, "engine": 1.25}


def test_a_step_is_one_line_and_rates_cover_the_training_time_of_the_last_steps(logs: GenerationLogs) -> None:
    with ProgressReporter(logs, 0, 60, Clock()) as reporter:
        reporter.record_step(dataclasses.replace(STEP, statistics={"rewardMargin": 0.5}), samples=16, total_steps=10)
    fields = {name: value for name, value in STEP.__dict__.items() if name != "statistics"}
    assert list(files.read_lines(logs.steps)) == [{**fields, "rewardMargin": 0.5}]
    found = progress(logs)
    assert (found["step"], found["totalSteps"], found["epoch"], found["loss"]) == (3, 10, 0.6, 2.5)
    assert (found["tokensPerSecond"], found["samplesPerSecond"]) == (400.0, 32.0)
    assert found["etaSeconds"] == 5.6, "the time left includes evaluations and waits for checkpoints"


def test_events_carry_their_time(logs: GenerationLogs) -> None:
    with ProgressReporter(logs, 0, 60, Clock()) as reporter:
        reporter.record_event("committed", step=5)
    (event,) = files.read_lines(logs.events)
    assert (event["event"], event["step"]) == ("committed", 5)
    assert event["time"] > 1.6e9


def test_longest_time_between_heartbeats_of_the_phase_is_written(logs: GenerationLogs) -> None:
    clock = Clock()
    with ProgressReporter(logs, 0, 60, clock) as reporter:
        clock.now += 50
        reporter.set_phase(Phase.TRAINING)  # the 50 s were set-up
        for seconds in (1, 4, 2):
            clock.now += seconds
            reporter.heartbeat()
    progress = files.read_json(logs.progress)
    assert progress is not None
    assert progress["heartbeatSeconds"] == 4


def test_other_ranks_have_a_watchdog_and_write_nothing(logs: GenerationLogs) -> None:
    with ProgressReporter(logs, 1, 60, Clock()) as reporter:
        reporter.set_phase(Phase.TRAINING)
        reporter.record_step(STEP, samples=16, total_steps=10)
        reporter.record_event("committed", step=5)
        reporter.sync()
    assert [path.name for path in logs.root.iterdir()] == ["stacks-rank-00001.txt"]


def test_steps_are_on_the_disk_before_a_commit(logs: GenerationLogs) -> None:
    with ProgressReporter(logs, 0, 60, Clock()) as reporter:
        reporter.sync()
        reporter.record_step(STEP, samples=16, total_steps=10)
        reporter.sync()
    assert len(list(files.read_lines(logs.steps))) == 1


def test_steps_that_a_full_volume_refuses_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = GenerationLogs(tmp_path)
    real = files.append_json

    def refuse(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with ProgressReporter(logs, 0, hang_timeout_seconds=600) as reporter:
        reporter.record_step(STEP, samples=16, total_steps=10)
        monkeypatch.setattr(files, "append_json", refuse)
        reporter.record_step(dataclasses.replace(STEP, step=4), samples=16, total_steps=10)
        reporter.record_event("restored", step=3)
        with pytest.raises(OSError, match="could not be written yet"):
            reporter.sync()
        monkeypatch.setattr(files, "append_json", real)
        reporter.record_step(dataclasses.replace(STEP, step=5), samples=16, total_steps=10)
        reporter.sync()
    assert [line["step"] for line in files.read_lines(logs.steps)] == [3, 4, 5]
    assert [line["event"] for line in files.read_lines(logs.events)] == ["restored"]


def test_numbers_that_a_function_reports_are_scores_of_their_step(logs: GenerationLogs) -> None:
    times: dict[str, Any] = {"seconds": 1.0, "productive_seconds": 1.0, "total_steps": None, "world_size": 1}
    with ProgressReporter(logs, 0, 60) as reporter:
        reporter.record_report(generation=1, step=10, metrics={"loss": 2.0, "accuracy": 0.5, "f1": 0.25}, **times)
        reporter.record_report(generation=1, step=20, metrics={"loss": 1.0, "epoch": 2.0, "accuracy": 0.75}, **times)
        reporter.record_report(generation=1, step=30, metrics={"loss": 0.5, "epoch": 3.0}, **times)
    found = progress(logs)
    assert (found["step"], found["loss"], found["epoch"]) == (30, 0.5, 3.0)
    assert found["evalScores"] == {"accuracy": 0.75, "f1": 0.25}, "a number that a report leaves out stays"
    assert found["evalStep"] == 20
