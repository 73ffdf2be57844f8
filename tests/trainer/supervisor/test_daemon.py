"""What follows the end of a supervisor in a pod: it tries again, waits for another's silence, shows the outcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotune.errors import InfrastructureError, JobError, SpotuneError, SupersededError, UsageError
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.lock import locked, locked_if_possible
from spotune_trainer.supervisor.control import Orders, Standing
from spotune_trainer.supervisor.daemon import AGAIN_SECONDS, SILENCE_SECONDS, Stay
from spotune_trainer.supervisor.supervisor import StoppedError


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "job")


class Container:
    """A `Stay` whose runs end as told; time passes only while it sleeps, and after the last run it is told to leave."""

    def __init__(self, directory: JobDirectory, *ends: SpotuneError | OSError | None) -> None:
        self.directory = directory
        self.orders = Orders()
        self.standing = Standing(self.orders)
        self.said: list[str] = []
        self.started: list[float] = []
        self.now = 0.0
        self.file_changed = False
        self.while_sleeping: Callable[[], object] = lambda: None
        self._ends = list(ends)

    def stay(self) -> None:
        Stay(
            self.directory,
            self._run,
            self.orders,
            self.standing,
            lambda: self.file_changed,
            self.said.append,
            self._sleep,
        ).until_told_to_leave()

    def says(self) -> dict[str, Any]:
        return self.standing.as_json()

    def _run(self) -> None:
        self.started.append(self.now)
        self.file_changed = False
        if not self._ends:
            self.orders.leave()
            raise StoppedError("as asked")
        end = self._ends.pop(0)
        if end is not None:
            raise end

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.while_sleeping()
        if self.now > 10_000:
            self.orders.leave()


def test_trained_job_is_shown_until_the_pod_goes(directory: JobDirectory) -> None:
    container = Container(directory, None)
    states: set[str] = set()
    container.while_sleeping = lambda: states.add(container.says()["state"])
    container.stay()
    assert container.started == [0.0]
    assert states == {"trained"}


def test_broken_job_is_shown_with_its_reason_until_the_pod_goes(directory: JobDirectory) -> None:
    container = Container(directory, JobError("spec.dataset.train: there is no such bucket"))
    with pytest.raises(JobError):
        container.stay()
    assert container.started == [0.0]
    says = container.says()
    assert (says["state"], says["message"]) == ("failed", "spec.dataset.train: there is no such bucket")
    status = files.read_json(directory.status)
    assert status is not None
    assert (status["phase"], status["message"]) == ("Failed", "spec.dataset.train: there is no such bucket")


def test_what_the_driver_said_of_a_failure_is_kept(directory: JobDirectory) -> None:
    directory.root.mkdir()
    files.write_json(directory.status, {"phase": "Failed", "heartbeat": 7, "time": 0, "message": "rank 1: bad row 12"})
    with pytest.raises(JobError):
        Container(directory, JobError("the last words")).stay()
    status = files.read_json(directory.status)
    assert status is not None
    assert status["message"] == "rank 1: bad row 12"


@pytest.mark.parametrize("outcome", [None, JobError("bad")])
def test_another_job_file_ends_the_wait_after_an_outcome(directory: JobDirectory, outcome: JobError | None) -> None:
    container = Container(directory, outcome)

    def change() -> None:
        container.file_changed = container.now >= 100

    container.while_sleeping = change
    container.stay()
    assert container.started == [0.0, 100.0]


@pytest.mark.parametrize(
    "error", [InfrastructureError("Ray is away"), UsageError("cannot be written to"), OSError(5, "Input/output error")]
)
def test_what_is_not_the_jobs_fault_is_tried_again_for_ever(
    directory: JobDirectory, error: SpotuneError | OSError
) -> None:
    container = Container(directory, *[error] * 5)
    messages: set[str] = set()
    container.while_sleeping = lambda: messages.add(f"{container.says()['state']}: {container.says()['message']}")
    container.stay()
    assert container.started == [AGAIN_SECONDS * number for number in range(6)]
    assert messages == {f"waiting: {error}; once more in {AGAIN_SECONDS:.0f} s"}


def test_failure_that_cannot_be_written_down_is_tried_again(directory: JobDirectory) -> None:
    directory.root.write_text("not a folder")
    container = Container(directory, JobError("bad"))
    container.stay()
    assert container.started == [0.0, AGAIN_SECONDS]


def test_superseded_supervisor_waits_while_the_other_one_beats(directory: JobDirectory) -> None:
    directory.root.mkdir()
    container = Container(directory, SupersededError("another one trains"))

    def beat() -> None:
        status = {"heartbeat": int(min(container.now, 500) / 100), "phase": "Training"}
        files.write_json(directory.status, status, durable=False)

    container.while_sleeping = beat
    container.stay()
    assert container.started == [0.0, 500 + SILENCE_SECONDS]


@pytest.mark.parametrize("error", [StoppedError("as asked"), InfrastructureError("Ray is away")])
def test_stopped_supervisor_starts_when_it_is_told_to(directory: JobDirectory, error: SpotuneError) -> None:
    container = Container(directory, error)
    container.orders.stop(60)
    states: set[str] = set()

    def start() -> None:
        states.add(container.says()["state"])
        if container.now >= 100:
            container.orders.start()

    container.while_sleeping = start
    container.stay()
    assert container.started == [0.0, 100.0]
    assert states == {"stopped"}


def test_stop_and_start_during_a_wait_end_it(directory: JobDirectory) -> None:
    container = Container(directory, UsageError("cannot be written to"), UsageError("cannot be written to"))

    def order() -> None:
        if container.now == 2:
            container.orders.stop(60)
        if container.now == 5:
            container.orders.start()

    container.while_sleeping = order
    container.stay()
    assert container.started == [0.0, 2.0, 5.0]


def test_told_to_leave_while_training_it_leaves(directory: JobDirectory) -> None:
    container = Container(directory)
    container.stay()
    assert container.started == [0.0]
    assert container.says()["state"] == "stopped"


def test_lock_of_a_lost_machine_is_waited_for_and_then_passed_over(directory: JobDirectory) -> None:
    said: list[str] = []
    with locked(directory), locked_if_possible(directory, 0, said.append):
        pass
    assert said[0].startswith("going on without the lock, held for 0 s")


def test_free_lock_is_held(directory: JobDirectory) -> None:
    said: list[str] = []
    with locked_if_possible(directory, 0, said.append), pytest.raises(SpotuneError), locked(directory):
        pass
    assert said == []
