"""The supervisor of a pod by its HTTP API: preflight, changed jobs, signals, and results."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest

from spotune.errors import JobError
from spotune_trainer import files
from spotune_trainer.job_directory.job import job_of
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor import daemon
from tests.trainer.support.checkpoints import commit_checkpoint
from tests.trainer.support.pods import (
    DriverlessRay,
    MountedPod,
    Pod,
    fail_with_job_error,
    finish_training,
    ignore_stop,
    request,
    train_until_stopped,
)
from tests.trainer.support.runs import Runs
from tests.trainer.support.tiny import save_source

CHECKS = ["storage-semantics", "model", "data", "storage-space", "commit-time"]


def test_job_passes_preflight_is_trained_and_shown_until_the_pod_is_deleted(pod: MountedPod) -> None:
    digest = pod.write()

    def script() -> None:
        supervisor = pod.until_state("trained")
        assert supervisor["job"] == digest
        assert supervisor["message"] == ""
        assert supervisor["preflight"]["passed"]
        checks = supervisor["preflight"]["checks"]
        assert [check["name"] for check in checks] == CHECKS
        assert {check["status"] for check in checks} == {"passed"}
        assert all(check["message"] and check["seconds"] >= 0 for check in checks)
        assert pod.progress()["phase"] == "Done"
        assert pod.progress()["ageSeconds"] >= 0

    assert pod.run(script) is None
    assert pod.ray.attempts == 1


def test_missing_model_fails_its_check_until_it_is_uploaded(pod: MountedPod) -> None:
    later = pod.model.with_name("later")
    pod.write(later)

    def script() -> None:
        pod.until(lambda: "does not exist" in pod.supervisor()["message"], "the check has failed")
        assert pod.progress()["phase"] == "Starting"
        supervisor = pod.supervisor()
        assert supervisor["state"] == "preflight"
        assert not supervisor["preflight"]["passed"]
        checks = {check["name"]: check for check in supervisor["preflight"]["checks"]}
        assert checks["model"]["message"].startswith(f"spec.model.source: {later} does not exist")
        assert checks["data"]["status"] == "passed", "a failed check does not prevent the others"
        assert not pod.directory.job.exists()
        save_source(later, "seq2seq")
        pod.until_state("trained")

    assert pod.run(script) is None


def test_changed_job_is_checked_before_the_next_retry_is_due(pod: MountedPod) -> None:
    pod.write(pod.model.with_name("nowhere"))

    def script() -> None:
        pod.until(lambda: bool(pod.supervisor()["message"]), "the check has failed")
        digest = pod.write()
        assert pod.until_state("trained")["job"] == digest

    pod.run(script)


def test_passed_preflight_is_not_repeated_once_there_are_checkpoints(
    tmp_path: Path, runs: Runs, pod: MountedPod
) -> None:
    pod.ray.drive = train_until_stopped
    pod.run(lambda: pod.until(lambda: pod.state() == "running", "it runs"))
    record = files.read_json(pod.directory.preflight)
    commit_checkpoint(pod.directory, 1, 1)
    pod.model.rename(pod.model.with_name("gone"))
    pod.write(pod.model)

    second = Pod(tmp_path)

    def script() -> None:
        assert second.until_state("trained")["preflight"] == {"passed": True, "checks": record["checks"]}  # type: ignore[index]

    second.run(script)


def test_before_the_first_commit_every_container_repeats_the_preflight(tmp_path: Path, pod: MountedPod) -> None:
    pod.ray.drive = train_until_stopped
    pod.run(lambda: pod.until(lambda: pod.state() == "running", "it runs"))
    pod.model.rename(pod.model.with_name("gone"))
    second = Pod(tmp_path)
    second.run(lambda: second.until(lambda: "does not exist" in second.supervisor()["message"], "it failed"))


def test_supervisor_waits_for_ray_and_shows_that(pod: MountedPod) -> None:
    pod.ray.is_away = True

    def script() -> None:
        assert "Ray does not answer yet at http://ray" in pod.until_state("waiting")["message"]
        digest = pod.write(workers={"count": 3})
        pod.until(lambda: pod.supervisor()["job"] == digest, "the job file is read while it waits")
        pod.ray.is_away = False
        pod.until_state("trained")

    pod.run(script)


def test_changed_retry_policy_reaches_job_json_during_training(pod: MountedPod) -> None:
    pod.ray.drive = train_until_stopped

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        digest = pod.write(retry={"appFailureLimit": 9})
        pod.until(lambda: pod.supervisor()["job"] == digest, "the change is accepted")
        job = job_of(pod.directory)
        assert job is not None
        assert job.spec.retry.app_failure_limit == 9
        pod.write(training={"seed": 1})
        pod.until(lambda: "spec.training.seed changed" in pod.supervisor()["message"], "it is refused")
        assert (pod.supervisor()["job"], pod.state()) == (digest, "running")

    pod.run(script)


def test_failed_job_keeps_its_reason_until_its_file_changes(pod: MountedPod) -> None:
    pod.ray.drive = fail_with_job_error

    def script() -> None:
        supervisor = pod.until_state("failed")
        assert supervisor["message"] == "rank 0: no such column"
        assert pod.progress()["phase"] == "Failed"
        assert pod.post("/stop")["state"] == "failed"
        pod.post("/start")
        pod.ray.drive = train_until_stopped
        digest = pod.write(checkpoint={"keep": 5})
        pod.until(lambda: pod.progress()["phase"] == "Training", "it is tried again")
        assert pod.supervisor()["job"] == digest
        assert pod.state() == "running"

    assert pod.run(script) is None
    assert Ledger(pod.directory).records("job-changed")


def test_invalid_job_file_fails_and_the_supervisor_ends_with_its_error(pod: MountedPod) -> None:
    pod.job_path.write_text("kind: Pod")

    def script() -> None:
        supervisor = pod.until_state("failed")
        assert "expected kind: FinetuneJob" in supervisor["message"]
        assert supervisor["job"] == hashlib.sha256(b"kind: Pod").hexdigest()

    assert isinstance(pod.run(script), JobError)


def test_trained_job_continues_after_its_training_is_extended(pod: MountedPod) -> None:
    def script() -> None:
        pod.until_state("trained")
        commit_checkpoint(pod.directory, 5, 1)
        digest = pod.write(workers={"count": 3})
        pod.until(lambda: pod.supervisor()["job"] == digest, "the change is seen")
        pod.until_state("trained")
        assert pod.ray.attempts == 1, "as long as before"
        pod.write(training={"epochs": 2})
        pod.until(lambda: pod.ray.attempts == 2, "it goes on")
        pod.until_state("trained")

    pod.run(script)
    result = files.read_json(pod.directory.result)
    assert result is not None
    assert result["epochs"] == 2


def test_extension_during_the_last_step_is_not_lost(pod: MountedPod) -> None:
    def trains_while_the_job_changes(ray: DriverlessRay) -> int | None:
        code = finish_training(ray)
        pod.write(training={"epochs": 2})
        ray.drive = finish_training
        return code

    pod.ray.drive = trains_while_the_job_changes

    def script() -> None:
        pod.until(lambda: (files.read_json(pod.directory.result) or {}).get("epochs") == 2, "it went on")
        pod.until_state("trained")

    pod.run(script)


def test_supervisor_waits_for_a_missing_volume(pod: MountedPod, tmp_path: Path) -> None:
    pod.directory.root.parent.symlink_to(tmp_path / "volume")

    def script() -> None:
        pod.until(lambda: bool(pod.supervisor()["message"]), "the check has failed")
        checks = {check["name"]: check for check in pod.supervisor()["preflight"]["checks"]}
        assert "cannot write to" in checks["storage-semantics"]["message"]
        (tmp_path / "volume").mkdir()
        pod.until_state("trained")

    pod.run(script)


def test_training_continues_after_the_volume_was_away(pod: MountedPod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "RETRY_SECONDS", 1.0)
    pod.ray.drive = train_until_stopped
    away = pod.directory.root.with_name("away")

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        pod.ray.drive = lambda _: None
        pod.directory.root.rename(away)
        pod.directory.root.write_text("not a folder")
        pod.write(workers={"count": 3})
        pod.until(lambda: "retrying in" in pod.supervisor()["message"], "the error is shown")
        assert pod.progress()["phase"] == "Training", "the last known status"
        pod.directory.root.unlink()
        away.rename(pod.directory.root)
        pod.ray.drive = finish_training
        pod.until_state("trained")
        assert pod.ray.attempts == 1

    pod.run(script)


def test_sigterm_while_training_lets_the_workers_commit_and_train_on(pod: MountedPod) -> None:
    """The supervisor ends once the last step is committed, and stops neither the driver nor the workers."""

    def commit_at_notice(ray: DriverlessRay) -> int | None:
        earlier = files.read_json(ray.directory.status) or {"heartbeat": 0}
        noticed = files.read_json(ray.directory.notice)
        committed.append(12 if noticed is not None else 10)
        changes = {"time": 1.0, "heartbeat": earlier["heartbeat"] + 1, "attempt": 1, "phase": "Training", "step": 12}
        status = {**earlier, **changes, "lastCheckpoint": {"step": committed[-1]}, "message": None}
        files.write_json(ray.directory.status, status, durable=False)
        return None

    committed: list[int] = []
    pod.ray.drive = commit_at_notice
    pod.run(lambda: pod.until(lambda: pod.progress()["phase"] == "Training", "it trains"))
    assert committed[-1] == 12
    assert [job.status for job in pod.ray.jobs.values()] == ["RUNNING"]
    notice = files.read_json(pod.directory.notice)
    assert notice is not None
    assert (notice["stop"], notice["leave"]) == (False, False)
    assert any("the workers commit and train on" in line for line in pod.lines)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the signal may arrive while one is opened
def test_second_sigterm_leaves_at_once(pod: MountedPod) -> None:
    pod.ray.drive = ignore_stop

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        os.kill(os.getpid(), signal.SIGTERM)
        pod.until_state("stopping")

    pod.run(script)
    assert [job.status for job in pod.ray.jobs.values()] == ["RUNNING"]


def test_stale_heartbeat_makes_the_container_unhealthy(pod: MountedPod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.write(retry={"hangTimeout": "1s"})
    pod.ray.drive = lambda _: None
    monkeypatch.setattr(pod.ray, "stop", lambda _: None)

    def script() -> None:
        assert request(f"{pod.url}/healthz") == (200, "ok\n"), "during preflight"
        pod.until(lambda: request(f"{pod.url}/healthz")[0] == 503, "it is unhealthy")
        pod.ray.drive = finish_training
        pod.until_state("trained")
        assert request(f"{pod.url}/healthz") == (200, "ok\n")

    pod.run(script)
