"""The supervisor of a pod stays until the pod goes: it tries again, waits for another's silence, shows the outcome."""

import json
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotune.errors import InfrastructureError, JobError, SpotuneError, SupersededError, UsageError
from spotune_trainer import files, stay
from spotune_trainer.directory_lock import locked, locked_if_possible
from spotune_trainer.layout import JobDirectory
from spotune_trainer.stay import Stay
from spotune_trainer.supervise import StoppedError
from tests.trainer.waiting import wait_until


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "job")


@pytest.fixture
def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number


def progress(port: int) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:
        return None


class Pod:
    """A `Stay` whose supervisor ends as told; SIGTERM comes once `seen` holds."""

    def __init__(self, directory: JobDirectory, port: int, *ends: SpotuneError | None) -> None:
        self.said: list[str] = []
        self.runs = 0
        self._ends = list(ends)
        self._stay = Stay(directory, self._run, self.said.append, ("127.0.0.1", port))

    def _run(self) -> None:
        self.runs += 1
        end = self._ends.pop(0)
        if end is not None:
            raise end

    def stay(self) -> None:
        self._stay.until_stopped()

    def stay_until(self, seen: Callable[[], bool]) -> None:
        def stop() -> None:
            wait_until(seen, 30)
            os.kill(os.getpid(), signal.SIGTERM)

        stopper = threading.Thread(target=stop)
        stopper.start()
        try:
            self.stay()
        finally:
            stopper.join()


def test_trained_job_is_shown_until_the_pod_goes(directory: JobDirectory, port: int) -> None:
    directory.root.mkdir()
    files.write_json(directory.status, {"phase": "Done", "heartbeat": 7, "time": 0})
    pod = Pod(directory, port, None)
    pod.stay_until(lambda: (progress(port) or {}).get("phase") == "Done")
    assert pod.runs == 1


def test_broken_job_is_shown_with_its_reason_until_the_pod_goes(directory: JobDirectory, port: int) -> None:
    pod = Pod(directory, port, JobError("spec.dataset.train: there is no such bucket"))
    with pytest.raises(JobError):
        pod.stay_until(lambda: (progress(port) or {}).get("phase") == "Failed")
    status = files.read_json(directory.status)
    assert status is not None
    assert status["message"] == "spec.dataset.train: there is no such bucket"


def test_what_the_driver_said_of_a_failure_is_kept(directory: JobDirectory, port: int) -> None:
    directory.root.mkdir()
    files.write_json(directory.status, {"phase": "Failed", "heartbeat": 7, "time": 0, "message": "rank 1: bad row 12"})
    pod = Pod(directory, port, JobError("the last words"))
    with pytest.raises(JobError):
        pod.stay_until(lambda: (progress(port) or {}).get("phase") == "Failed")
    status = files.read_json(directory.status)
    assert status is not None
    assert status["message"] == "rank 1: bad row 12"


def test_infrastructure_is_tried_again_for_ever(
    directory: JobDirectory, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stay, "AGAIN_SECONDS", 0.0)
    pod = Pod(directory, port, *[InfrastructureError("Ray is away")] * 5, None)
    pod.stay_until(lambda: pod.runs == 6)
    assert pod.said[:5] == ["Ray is away; once more in 0 s"] * 5


def test_volume_that_cannot_be_written_to_is_tried_again(
    directory: JobDirectory, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stay, "AGAIN_SECONDS", 0.0)
    pod = Pod(directory, port, UsageError("cannot be written to"), None)
    pod.stay_until(lambda: pod.runs == 2)


def test_superseded_supervisor_waits_while_the_other_one_beats(
    directory: JobDirectory, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stay, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(stay, "_POLL_SECONDS", 0.05)
    directory.root.mkdir()
    other_trains = threading.Event()

    def beat() -> None:
        for heartbeat in range(30):
            assert pod.runs < 2
            files.write_json(directory.status, {"heartbeat": heartbeat, "time": 0, "phase": "Training"})
            other_trains.wait(0.1)
        other_trains.set()

    pod = Pod(directory, port, SupersededError("another one trains"), None)
    beats = threading.Thread(target=beat)
    beats.start()
    pod.stay_until(lambda: pod.runs == 2)
    beats.join()
    assert other_trains.is_set()


def test_told_to_stop_while_training_it_leaves(directory: JobDirectory, port: int) -> None:
    pod = Pod(directory, port, StoppedError("as asked"))
    pod.stay()
    assert pod.runs == 1


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
