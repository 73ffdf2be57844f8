"""Stopping the supervisor of a pod by its HTTP API, and starting it again."""

from __future__ import annotations

import pytest

from spotune_trainer import files
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.job_watch import put_changed_job
from spotune_trainer.supervisor.preflight.admission import read_job
from tests.trainer.support.pods import (
    MountedPod,
    finish_training,
    ignore_stop,
    train_until_stopped,
)


def test_stop_lets_the_workers_commit_and_start_continues(pod: MountedPod) -> None:
    pod.ray.drive = train_until_stopped

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        assert pod.post("/stop", b'{"seconds": 30}')["state"] == "stopping"
        notice = files.read_json(pod.directory.notice)
        pod.until_state("stopped")
        assert pod.progress()["phase"] == "Starting"
        assert pod.post("/stop")["state"] == "stopped"
        notice = files.read_json(pod.directory.notice)
        assert notice is not None
        assert notice["deadline"] - notice["time"] == pytest.approx(30)
        attempts = pod.ray.attempts
        pod.ray.drive = finish_training
        assert pod.post("/start")["state"] != "stopped"
        pod.until_state("trained")
        assert (attempts, pod.ray.attempts) == (1, 2)
        assert pod.post("/stop")["state"] == "trained", "nothing runs that could be stopped"

    assert pod.run(script) is None
    assert Ledger(pod.directory).records("failure") == []


def test_driver_that_ignores_a_stop_is_stopped_by_ray(pod: MountedPod) -> None:
    pod.ray.drive = ignore_stop

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        pod.post("/stop", b'{"seconds": 0.2}')
        pod.until_state("stopped")

    pod.run(script)
    assert [job.status for job in pod.ray.jobs.values()] == ["STOPPED"]


def test_resumed_job_is_stopping_until_its_workers_have_left(pod: MountedPod) -> None:
    pod.ray.drive = ignore_stop

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        pod.post("/stop", b'{"seconds": 60}')
        pod.until(pod.directory.notice.exists, "the workers have the notice")
        assert pod.post("/start")["state"] == "stopping"
        pod.ray.drive = train_until_stopped
        pod.until(lambda: pod.ray.attempts == 2, "it starts again")
        assert pod.state() == "running"
        pod.ray.drive = finish_training
        pod.until_state("trained")

    assert pod.run(script) is None


def test_stop_during_preflight_starts_nothing(pod: MountedPod) -> None:
    pod.write(pod.model.with_name("later"))

    def script() -> None:
        pod.until(lambda: bool(pod.supervisor()["message"]), "the check has failed")
        pod.post("/stop")
        pod.until_state("stopped")
        digest = pod.write()
        pod.until(lambda: pod.supervisor()["job"] == digest, "the job file is read while it is stopped")
        assert pod.ray.attempts == 0
        pod.post("/start")
        pod.until_state("trained")

    pod.run(script)


def test_attempt_of_a_killed_supervisor_is_stopped_without_preflight(pod: MountedPod) -> None:
    put_changed_job(pod.directory, read_job(pod.job_path, {}))
    metadata = {"spotune-directory": str(pod.directory.root), "spotune-attempt": "1"}
    pod.ray.submit("driver", "spotune-1", metadata)
    pod.ray.drive = train_until_stopped
    pod.model.rename(pod.model.with_name("gone"))

    def script() -> None:
        pod.until(lambda: "does not exist" in pod.supervisor()["message"], "the preflight has failed")
        assert pod.ray.jobs["spotune-1"].status == "RUNNING"
        pod.post("/stop")
        pod.until_state("stopped")
        assert pod.ray.jobs["spotune-1"].exit_code == 10
        assert not pod.supervisor()["preflight"]["passed"]

    pod.run(script)
    assert pod.ray.attempts == 1


def test_state_is_stopping_while_ray_does_not_answer(pod: MountedPod) -> None:
    pod.ray.drive = train_until_stopped

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        pod.ray.is_away = True
        pod.post("/stop")
        pod.until(lambda: bool(files.read_json(pod.directory.notice)), "the workers have a notice on the volume")
        assert pod.state() == "stopping"
        pod.ray.is_away = False
        pod.until_state("stopped")

    pod.run(script)
    assert [job.exit_code for job in pod.ray.jobs.values()] == [10]
