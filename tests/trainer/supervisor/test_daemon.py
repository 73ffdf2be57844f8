"""What the daemon does after each result of a supervisor: retry, wait for another supervisor, show the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotune.errors import InfrastructureError, JobError, SpotuneError, StoppedError, SupersededError, UsageError
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.lock import locked, locked_if_possible
from spotune_trainer.supervisor.control import ControlSignals, SupervisorStatus
from spotune_trainer.supervisor.daemon import RETRY_SECONDS, TAKEOVER_SECONDS, SupervisorDaemon


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "job")


class Container:
    """A `SupervisorDaemon` with scripted results; time passes only in `sleep`, and after the last run it terminates."""

    def __init__(self, directory: JobDirectory, *results: SpotuneError | OSError | None) -> None:
        self.directory = directory
        self.control = ControlSignals()
        self.status = SupervisorStatus(self.control)
        self.lines: list[str] = []
        self.started: list[float] = []
        self.now = 0.0
        self.file_changed = False
        self.while_sleeping: Callable[[], object] = lambda: None
        self._results = list(results)

    def run(self) -> None:
        SupervisorDaemon(
            self.directory,
            self._run,
            self.control,
            self.status,
            lambda: self.file_changed,
            self.lines.append,
            self._sleep,
        ).run_until_terminated()

    def shown(self) -> dict[str, Any]:
        return self.status.as_json()

    def _run(self) -> None:
        self.started.append(self.now)
        self.file_changed = False
        if not self._results:
            self.control.terminate()
            raise StoppedError("as asked")
        result = self._results.pop(0)
        if result is not None:
            raise result

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.while_sleeping()
        if self.now > 10_000:
            self.control.terminate()


def test_trained_job_is_shown_until_the_pod_is_deleted(directory: JobDirectory) -> None:
    container = Container(directory, None)
    states: set[str] = set()
    container.while_sleeping = lambda: states.add(container.shown()["state"])
    container.run()
    assert container.started == [0.0]
    assert states == {"trained"}


def test_failed_job_is_shown_with_its_reason_until_the_pod_is_deleted(directory: JobDirectory) -> None:
    container = Container(directory, JobError("spec.dataset.train: there is no such bucket"))
    with pytest.raises(JobError):
        container.run()
    assert container.started == [0.0]
    shown = container.shown()
    assert (shown["state"], shown["message"]) == ("failed", "spec.dataset.train: there is no such bucket")
    status = files.read_json(directory.status)
    assert status is not None
    assert (status["phase"], status["message"]) == ("Failed", "spec.dataset.train: there is no such bucket")


def test_drivers_message_of_a_failure_is_kept(directory: JobDirectory) -> None:
    directory.root.mkdir()
    files.write_json(directory.status, {"phase": "Failed", "heartbeat": 7, "time": 0, "message": "rank 1: bad row 12"})
    with pytest.raises(JobError):
        Container(directory, JobError("the last words")).run()
    status = files.read_json(directory.status)
    assert status is not None
    assert status["message"] == "rank 1: bad row 12"


@pytest.mark.parametrize("outcome", [None, JobError("bad")])
def test_changed_job_file_ends_the_wait_after_a_result(directory: JobDirectory, outcome: JobError | None) -> None:
    container = Container(directory, outcome)

    def change() -> None:
        container.file_changed = container.now >= 100

    container.while_sleeping = change
    container.run()
    assert container.started == [0.0, 100.0]


@pytest.mark.parametrize(
    "error", [InfrastructureError("Ray is away"), UsageError("cannot be written to"), OSError(5, "Input/output error")]
)
def test_failure_that_is_not_the_jobs_fault_is_retried_without_limit(
    directory: JobDirectory, error: SpotuneError | OSError
) -> None:
    container = Container(directory, *[error] * 5)
    messages: set[str] = set()
    container.while_sleeping = lambda: messages.add(f"{container.shown()['state']}: {container.shown()['message']}")
    container.run()
    assert container.started == [RETRY_SECONDS * number for number in range(6)]
    assert messages == {f"waiting: {error}; retrying in {RETRY_SECONDS:.0f} s"}


def test_failure_that_cannot_be_recorded_is_retried(directory: JobDirectory) -> None:
    directory.root.write_text("not a folder")
    container = Container(directory, JobError("bad"))
    container.run()
    assert container.started == [0.0, RETRY_SECONDS]


def test_superseded_supervisor_waits_while_the_other_heartbeat_changes(directory: JobDirectory) -> None:
    directory.root.mkdir()
    container = Container(directory, SupersededError("another one trains"))

    def beat() -> None:
        status = {"heartbeat": int(min(container.now, 500) / 100), "phase": "Training"}
        files.write_json(directory.status, status, durable=False)

    container.while_sleeping = beat
    container.run()
    assert container.started == [0.0, 500 + TAKEOVER_SECONDS]


@pytest.mark.parametrize("error", [StoppedError("as asked"), InfrastructureError("Ray is away")])
def test_stopped_supervisor_starts_after_resume(directory: JobDirectory, error: SpotuneError) -> None:
    container = Container(directory, error)
    container.control.suspend(60)
    states: set[str] = set()

    def start() -> None:
        states.add(container.shown()["state"])
        if container.now >= 100:
            container.control.resume()

    container.while_sleeping = start
    container.run()
    assert container.started == [0.0, 100.0]
    assert states == {"stopped"}


def test_suspend_and_resume_end_a_wait(directory: JobDirectory) -> None:
    container = Container(directory, UsageError("cannot be written to"), UsageError("cannot be written to"))

    def suspend_and_resume() -> None:
        if container.now == 2:
            container.control.suspend(60)
        if container.now == 5:
            container.control.resume()

    container.while_sleeping = suspend_and_resume
    container.run()
    assert container.started == [0.0, 2.0, 5.0]


def test_termination_while_training_ends_the_daemon(directory: JobDirectory) -> None:
    container = Container(directory)
    container.run()
    assert container.started == [0.0]
    assert container.shown()["state"] == "stopped"


def test_lock_of_a_lost_machine_is_ignored_after_a_wait(directory: JobDirectory) -> None:
    lines: list[str] = []
    with locked(directory), locked_if_possible(directory, 0, lines.append):
        pass
    assert lines[0].startswith("continuing without the lock, which was not free within 0 s")


def test_free_lock_is_held(directory: JobDirectory) -> None:
    lines: list[str] = []
    with locked_if_possible(directory, 0, lines.append), pytest.raises(SpotuneError), locked(directory):
        pass
    assert lines == []
