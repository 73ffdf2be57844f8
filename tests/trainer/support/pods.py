"""The supervisor of a pod as the operator sees it: its HTTP API, its job file, and a scripted Ray head."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from spotune.errors import SpotuneError
from spotune_trainer import files
from spotune_trainer.job_directory.job import job_of
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.attempt import Timing
from spotune_trainer.supervisor.console import PlainView
from spotune_trainer.supervisor.control import ControlSignals, SupervisorStatus
from spotune_trainer.supervisor.daemon import SupervisorDaemon
from spotune_trainer.supervisor.http_server import ProgressServer
from spotune_trainer.supervisor.job_watch import JobFile
from spotune_trainer.supervisor.pod_api import PodApi
from spotune_trainer.supervisor.pod_supervisor import PodSupervisor
from spotune_trainer.supervisor.preflight.bucket import other_heartbeat
from spotune_trainer.supervisor.preflight.checks import checks_of
from spotune_trainer.supervisor.preflight.runner import Preflight
from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError, RayJob
from tests.trainer.support.runs import Runs
from tests.trainer.support.tiny import make_job, save_source
from tests.trainer.support.waiting import wait_until

_PATIENCE_SECONDS = 120.0
_SPEED = 50.0
"""Seconds of the supervisor's clock in one second of the test."""

Drive = Callable[["DriverlessRay"], "int | None"]
"""Plays the driver of an attempt: returns its exit code, or None while it runs."""


class DriverlessRay(JobsClient):
    """A Ray head and its Jobs API in one; each poll calls the function `drive` in place of a driver."""

    def __init__(self, directory: JobDirectory) -> None:
        super().__init__("http://ray", "secret")
        self.directory = directory
        self.is_away = False
        self.drive: Drive = finish_training
        self.jobs: dict[str, RayJob] = {}

    @property
    def attempts(self) -> int:
        return len(self.jobs)

    def reattach(self, record: Mapping[str, Any] | None) -> bool:
        return self.is_responding()

    def find(self, submission_id: str) -> RayJob | None:
        self._refuse_while_away()
        job = self.jobs.get(submission_id)
        if job is None or job.has_ended:
            return job
        code = self.drive(self)
        if code is not None:
            job = RayJob(submission_id, "SUCCEEDED" if code == 0 else "FAILED", code, "", job.metadata)
            self.jobs[submission_id] = job
        return job

    def list_jobs(self) -> list[RayJob]:
        self._refuse_while_away()
        return list(self.jobs.values())

    def submit(self, entrypoint: str, submission_id: str, metadata: Any) -> None:
        self._refuse_while_away()
        self.jobs[submission_id] = RayJob(submission_id, "RUNNING", None, "", metadata)

    def stop(self, submission_id: str) -> None:
        self.jobs[submission_id] = RayJob(submission_id, "STOPPED", None, "", self.jobs[submission_id].metadata)

    def logs(self, submission_id: str) -> str:
        return "the driver's last line"

    def is_responding(self) -> bool:
        return not self.is_away

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        return True

    def client(self) -> JobsClient:
        return self

    def record(self) -> dict[str, Any] | None:
        return None

    def shut_down(self, *, spares_ranks: bool = False) -> None: ...

    def _refuse_while_away(self) -> None:
        if self.is_away:
            raise JobsUnavailableError("connection refused")


def finish_training(ray: DriverlessRay) -> int | None:
    """Finish the training at once, with the length that the job has."""
    job = job_of(ray.directory)
    assert job is not None
    length = {"epochs": job.spec.training.epochs, "maxSteps": job.spec.training.max_steps}
    files.write_json(ray.directory.result, length)
    _publish(ray, "Done")
    return 0


def train_until_stopped(ray: DriverlessRay) -> int | None:
    """Train until there is a notice to stop."""
    _publish(ray, "Training")
    notice = files.read_json(ray.directory.notice)
    return 10 if notice is not None and notice["stop"] else None


def ignore_stop(ray: DriverlessRay) -> int | None:
    """Train without end and without a commit, and ignore notices."""
    _publish(ray, "Training", step=1)
    return None


def fail_with_job_error(ray: DriverlessRay) -> int | None:
    """Exit with the exit code of a JobError."""
    _publish(ray, "Failed", "rank 0: no such column")
    return 20


def _publish(ray: DriverlessRay, phase: str, message: str | None = None, **status: Any) -> None:
    earlier = files.read_json(ray.directory.status) or {"heartbeat": 0}
    changes = {"time": time.time(), "heartbeat": earlier["heartbeat"] + 1, "attempt": ray.attempts, "phase": phase}
    files.write_json(ray.directory.status, {**earlier, **changes, "message": message, **status}, durable=False)


class Pod:
    """A supervisor's container; all of it is real, except Ray and the pace of time."""

    def __init__(self, root: Path, ray: DriverlessRay | None = None, bucket: str = "") -> None:
        self.job_path = root / "job.yaml"
        self.bucket = bucket
        self.directory = JobDirectory(root / "data" / "job")
        self.ray = ray or DriverlessRay(self.directory)
        self.lines: list[str] = []
        self.url = ""

    def write_job(self, source: Path | str, **sections: Any) -> str:
        """Mount a job file; returns its text."""
        text = make_job(source, **sections).model_dump_json(exclude_unset=True)
        self.job_path.write_text(text)
        return text

    def run(self, script: Callable[[], None]) -> SpotuneError | None:
        """Run the supervisor while a thread runs `script`, then send SIGTERM; returns the error of the supervisor."""
        errors: list[BaseException] = []

        def run_script() -> None:
            try:
                self.until(lambda: bool(self.url), "it is served")
                script()
            except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
                errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=run_script)
        earlier = signal.signal(signal.SIGTERM, lambda *_: None)  # if the supervisor has ended before the script
        thread.start()
        outcome: SpotuneError | None = None
        try:
            self._run_supervisor()
        except SpotuneError as error:
            outcome = error
        finally:
            thread.join()
            signal.signal(signal.SIGTERM, earlier)
        if errors:
            raise AssertionError(f"{errors[0]}; its last lines are {self.lines[-5:]}") from errors[0]
        return outcome

    def _run_supervisor(self) -> None:
        control = ControlSignals()
        status = SupervisorStatus(control)
        job_file = JobFile(self.job_path, self.directory, status, self.lines.append, lambda: time.monotonic() * _SPEED)
        sleep = lambda seconds: time.sleep(seconds / _SPEED)  # noqa: E731
        supervisor = PodSupervisor(
            self.directory,
            job_file,
            Preflight(self.directory, status.preflight, checks=partial(checks_of, bucket=self.bucket)),
            self.ray,
            PlainView(self.lines.append),
            control,
            status,
            Timing(poll=0.02, hang_margin=0.2, stop=0.5, unavailable=0.5),
            sleep,
            bucket=self.bucket,
        )
        daemon = SupervisorDaemon(
            self.directory,
            supervisor.run,
            control,
            status,
            job_file.has_changed,
            self.lines.append,
            sleep,
            other_heartbeat(self.bucket) if self.bucket else None,
        )
        api = PodApi(self.directory, control, status)
        with ProgressServer(
            self.directory, supervisor.health_problem, get_routes=api.get_routes, post_routes=api.post_routes
        ) as server:
            supervisor.url = self.url = server.url
            daemon.run_until_terminated()

    def progress(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/progress", timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def supervisor(self) -> dict[str, Any]:
        found: dict[str, Any] = self.progress()["supervisor"]
        return found

    def state(self) -> str:
        return str(self.supervisor()["state"])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        assert wait_until(condition, _PATIENCE_SECONDS), f"timed out waiting until {what}"

    def until_state(self, state: str) -> dict[str, Any]:
        """Wait for a state; returns the supervisor's part of `/progress`."""
        self.until(lambda: self.state() == state, f"{state}, it is {self.supervisor()}")
        return self.supervisor()

    def post(self, path: str, body: bytes = b"") -> dict[str, Any]:
        code, answer = request(f"{self.url}{path}", "POST", body)
        assert code == 200, answer
        found: dict[str, Any] = json.loads(answer)
        return found


class MountedPod(Pod):
    """A pod with a job whose model and data exist."""

    def __init__(self, root: Path, runs: Runs, ray: DriverlessRay | None = None) -> None:
        super().__init__(root, ray)
        self.model = root / "model"
        self.shards = runs.shards("seq2seq")
        if not self.model.exists():
            save_source(self.model, "seq2seq")
        self.write()

    def write(self, model: Path | None = None, **sections: object) -> str:
        """Mount the job with some sections changed; returns the file's SHA-256."""
        dataset = {"train": {"source": str(self.shards)}, "eval": None}
        text = self.write_job(model or self.model, dataset=dataset, **sections)
        return hashlib.sha256(text.encode()).hexdigest()


def request(url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, str]:
    """Status code and body of a response."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body, method=method), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()
