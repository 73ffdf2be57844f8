"""The supervisor of a pod, by what the operator sees of it: preflight, stop and start, changes of the job, outcomes."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest

from spotune.errors import JobError
from spotune_trainer import files
from spotune_trainer.job_directory.job import job_of, read_job
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor import daemon as stay
from spotune_trainer.supervisor.job_watch import put_changed_job
from tests.trainer.support.checkpoints import put_checkpoint
from tests.trainer.support.pods import DriverlessRay, Pod, fails, heeds_a_stop, heeds_nothing, request, trains
from tests.trainer.support.runs import Runs
from tests.trainer.support.tiny import save_source

CHECKS = ["storage-semantics", "model", "data", "storage-space", "commit-time"]


class MountedPod(Pod):
    """A pod with a job whose model and data are there."""

    def __init__(self, root: Path, runs: Runs, ray: DriverlessRay | None = None) -> None:
        super().__init__(root, ray)
        self.model = root / "model"
        self.shards = runs.shards("seq2seq")
        if not self.model.exists():
            save_source(self.model, "seq2seq")
        self.write()

    def write(self, model: Path | None = None, **sections: object) -> str:
        """Mount the job with some sections changed; its digest."""
        dataset = {"train": {"source": str(self.shards)}, "eval": None}
        text = self.write_job(model or self.model, dataset=dataset, **sections)
        return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def pod(tmp_path: Path, runs: Runs) -> MountedPod:
    return MountedPod(tmp_path, runs)


def test_job_passes_preflight_is_trained_and_is_shown_until_the_pod_goes(pod: MountedPod) -> None:
    digest = pod.write()

    def script() -> None:
        said = pod.until_state("trained")
        assert said["job"] == digest
        assert said["message"] == ""
        assert said["preflight"]["passed"]
        checks = said["preflight"]["checks"]
        assert [check["name"] for check in checks] == CHECKS
        assert {check["status"] for check in checks} == {"passed"}
        assert all(check["message"] and check["seconds"] >= 0 for check in checks)
        assert pod.progress()["phase"] == "Done"
        assert pod.progress()["ageSeconds"] >= 0

    assert pod.run(script) is None
    assert pod.ray.attempts == 1


def test_missing_model_is_a_failed_check_that_time_can_mend(pod: MountedPod) -> None:
    later = pod.model.with_name("later")
    pod.write(later)

    def script() -> None:
        pod.until(lambda: "does not exist" in pod.supervisor()["message"], "the check has failed")
        assert pod.progress()["phase"] == "Starting"
        said = pod.supervisor()
        assert said["state"] == "preflight"
        assert not said["preflight"]["passed"]
        checks = {check["name"]: check for check in said["preflight"]["checks"]}
        assert checks["model"]["message"].startswith(f"spec.model.source: {later} does not exist")
        assert checks["data"]["status"] == "passed", "what fails does not hide the others"
        assert not pod.directory.job.exists()
        save_source(later, "seq2seq")
        pod.until_state("trained")

    assert pod.run(script) is None


def test_changed_job_is_looked_at_before_the_time_of_the_next_try(pod: MountedPod) -> None:
    pod.write(pod.model.with_name("nowhere"))

    def script() -> None:
        pod.until(lambda: bool(pod.supervisor()["message"]), "the check has failed")
        digest = pod.write()
        assert pod.until_state("trained")["job"] == digest

    pod.run(script)


def test_preflight_that_passed_is_not_done_again_once_there_are_checkpoints(
    tmp_path: Path, runs: Runs, pod: MountedPod
) -> None:
    pod.ray.drive = heeds_a_stop
    pod.run(lambda: pod.until(lambda: pod.state() == "running", "it runs"))
    record = files.read_json(pod.directory.preflight)
    put_checkpoint(pod.directory, 1, 1)
    pod.model.rename(pod.model.with_name("gone"))
    pod.write(pod.model)

    second = Pod(tmp_path)

    def script() -> None:
        assert second.until_state("trained")["preflight"] == {"passed": True, "checks": record["checks"]}  # type: ignore[index]

    second.run(script)


def test_before_the_first_commit_every_container_looks_again(tmp_path: Path, pod: MountedPod) -> None:
    pod.ray.drive = heeds_a_stop
    pod.run(lambda: pod.until(lambda: pod.state() == "running", "it runs"))
    pod.model.rename(pod.model.with_name("gone"))
    second = Pod(tmp_path)
    second.run(lambda: second.until(lambda: "does not exist" in second.supervisor()["message"], "it failed"))


def test_stop_lets_the_workers_commit_and_start_goes_on(pod: MountedPod) -> None:
    pod.ray.drive = heeds_a_stop

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        assert pod.post("/stop", b'{"seconds": 30}')["state"] == "stopping"
        notice = files.read_json(pod.directory.notice)
        pod.until_state("stopped")
        assert pod.post("/stop")["state"] == "stopped"
        notice = files.read_json(pod.directory.notice)
        assert notice is not None
        assert notice["deadline"] - notice["time"] == pytest.approx(30)
        attempts = pod.ray.attempts
        pod.ray.drive = trains
        assert pod.post("/start")["state"] != "stopped"
        pod.until_state("trained")
        assert (attempts, pod.ray.attempts) == (1, 2)
        assert pod.post("/stop")["state"] == "trained", "nothing runs that could be stopped"

    assert pod.run(script) is None
    assert Ledger(pod.directory).records("failure") == []


def test_workers_that_do_not_heed_a_stop_are_ended(pod: MountedPod) -> None:
    pod.ray.drive = heeds_nothing

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        pod.post("/stop", b'{"seconds": 0.2}')
        pod.until_state("stopped")

    pod.run(script)
    assert [job.status for job in pod.ray.jobs.values()] == ["STOPPED"]


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


def test_what_a_killed_supervisor_left_running_is_stopped_without_preflight(pod: MountedPod) -> None:
    put_changed_job(pod.directory, read_job(pod.job_path, {}))
    metadata = {"spotune-directory": str(pod.directory.root), "spotune-attempt": "1"}
    pod.ray.submit("driver", "spotune-1", metadata)
    pod.ray.drive = heeds_a_stop
    pod.model.rename(pod.model.with_name("gone"))

    def script() -> None:
        pod.until(lambda: "does not exist" in pod.supervisor()["message"], "it looks before it does anything")
        assert pod.ray.jobs["spotune-1"].status == "RUNNING"
        pod.post("/stop")
        pod.until_state("stopped")
        assert pod.ray.jobs["spotune-1"].exit_code == 10
        assert not pod.supervisor()["preflight"]["passed"]

    pod.run(script)
    assert pod.ray.attempts == 1


def test_stop_is_not_said_to_be_done_while_ray_is_silent_and_may_run_something(pod: MountedPod) -> None:
    pod.ray.drive = heeds_a_stop

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        pod.ray.is_away = True
        pod.post("/stop")
        pod.until(lambda: bool(files.read_json(pod.directory.notice)), "the workers are told by the volume")
        assert pod.state() == "stopping"
        pod.ray.is_away = False
        pod.until_state("stopped")

    pod.run(script)
    assert [job.exit_code for job in pod.ray.jobs.values()] == [10]


def test_ray_that_does_not_answer_is_waited_for_and_said(pod: MountedPod) -> None:
    pod.ray.is_away = True

    def script() -> None:
        assert "Ray does not answer yet at http://ray" in pod.until_state("waiting")["message"]
        digest = pod.write(workers={"count": 3})
        pod.until(lambda: pod.supervisor()["job"] == digest, "the job file is read while it waits")
        pod.ray.is_away = False
        pod.until_state("trained")

    pod.run(script)


def test_change_of_how_reaches_job_json_while_it_trains(pod: MountedPod) -> None:
    pod.ray.drive = heeds_a_stop

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        digest = pod.write(retry={"appFailureLimit": 9})
        pod.until(lambda: pod.supervisor()["job"] == digest, "the change is taken in")
        job = job_of(pod.directory)
        assert job is not None
        assert job.spec.retry.app_failure_limit == 9
        pod.write(training={"seed": 1})
        pod.until(lambda: "spec.training.seed changed" in pod.supervisor()["message"], "it is refused")
        assert (pod.supervisor()["job"], pod.state()) == (digest, "running")

    pod.run(script)


def test_failed_job_stands_with_its_reason_until_its_file_changes(pod: MountedPod) -> None:
    pod.ray.drive = fails

    def script() -> None:
        said = pod.until_state("failed")
        assert said["message"] == "rank 0: no such column"
        assert pod.progress()["phase"] == "Failed"
        assert pod.post("/stop")["state"] == "failed"
        pod.post("/start")
        pod.ray.drive = heeds_a_stop
        digest = pod.write(checkpoint={"keep": 5})
        pod.until(lambda: pod.progress()["phase"] == "Training", "it is tried again")
        assert pod.supervisor()["job"] == digest
        assert pod.state() == "running"

    assert pod.run(script) is None
    assert Ledger(pod.directory).records("job-changed")


def test_job_file_that_is_wrong_has_failed_and_the_pod_ends_with_its_error(pod: MountedPod) -> None:
    pod.job_path.write_text("kind: Pod")

    def script() -> None:
        said = pod.until_state("failed")
        assert "a job file says kind: FinetuneJob" in said["message"]
        assert said["job"] == hashlib.sha256(b"kind: Pod").hexdigest()

    assert isinstance(pod.run(script), JobError)


def test_trained_job_goes_on_when_it_is_to_be_trained_longer(pod: MountedPod) -> None:
    def script() -> None:
        pod.until_state("trained")
        put_checkpoint(pod.directory, 5, 1)
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


def test_longer_training_that_came_with_the_last_step_is_not_lost(pod: MountedPod) -> None:
    def trains_while_the_job_changes(ray: DriverlessRay) -> int | None:
        code = trains(ray)
        pod.write(training={"epochs": 2})
        ray.drive = trains
        return code

    pod.ray.drive = trains_while_the_job_changes

    def script() -> None:
        pod.until(lambda: (files.read_json(pod.directory.result) or {}).get("epochs") == 2, "it went on")
        pod.until_state("trained")

    pod.run(script)


def test_folder_that_is_away_is_waited_for(pod: MountedPod, tmp_path: Path) -> None:
    pod.directory.root.parent.symlink_to(tmp_path / "volume")

    def script() -> None:
        pod.until(lambda: bool(pod.supervisor()["message"]), "the check has failed")
        checks = {check["name"]: check for check in pod.supervisor()["preflight"]["checks"]}
        assert "cannot write to" in checks["storage-semantics"]["message"]
        (tmp_path / "volume").mkdir()
        pod.until_state("trained")

    pod.run(script)


def test_volume_that_goes_away_while_it_trains_comes_back(pod: MountedPod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stay, "AGAIN_SECONDS", 1.0)
    pod.ray.drive = heeds_a_stop
    away = pod.directory.root.with_name("away")

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        pod.ray.drive = lambda _: None
        pod.directory.root.rename(away)
        pod.directory.root.write_text("not a folder")
        pod.write(workers={"count": 3})
        pod.until(lambda: "once more in" in pod.supervisor()["message"], "it is said")
        assert pod.progress()["phase"] == "Training", "the last that was known"
        pod.directory.root.unlink()
        away.rename(pod.directory.root)
        pod.ray.drive = trains
        pod.until_state("trained")
        assert pod.ray.attempts == 1

    pod.run(script)


def test_sigterm_while_training_lets_the_workers_commit(pod: MountedPod) -> None:
    pod.ray.drive = heeds_a_stop
    pod.run(lambda: pod.until(lambda: pod.progress()["phase"] == "Training", "it trains"))
    assert [job.exit_code for job in pod.ray.jobs.values()] == [10]
    assert any("stopping: the workers commit and leave" in line for line in pod.said)


def test_second_sigterm_leaves_at_once(pod: MountedPod) -> None:
    pod.ray.drive = heeds_nothing

    def script() -> None:
        pod.until(lambda: pod.progress()["phase"] == "Training", "it trains")
        os.kill(os.getpid(), signal.SIGTERM)
        pod.until_state("stopping")

    pod.run(script)
    assert [job.status for job in pod.ray.jobs.values()] == ["RUNNING"]


def test_driver_that_gives_no_sign_of_life_makes_the_container_ill(
    pod: MountedPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.write(retry={"hangTimeout": "1s"})
    pod.ray.drive = lambda _: None
    monkeypatch.setattr(pod.ray, "stop", lambda _: None)

    def script() -> None:
        assert request(f"{pod.url}/healthz") == (200, "ok\n"), "during preflight"
        pod.until(lambda: request(f"{pod.url}/healthz")[0] == 503, "it is ill")
        pod.ray.drive = trains
        pod.until_state("trained")
        assert request(f"{pod.url}/healthz") == (200, "ok\n")

    pod.run(script)
