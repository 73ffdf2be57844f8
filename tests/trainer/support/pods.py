"""The supervisor of a pod as the operator sees it: its HTTP, its job file, and a Ray of the test's own making."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from spotune.errors import SpotuneError
from spotune_trainer import files
from spotune_trainer.job_directory.job import job_of
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.attempt import Timing
from spotune_trainer.supervisor.console import PlainView
from spotune_trainer.supervisor.control import Orders, Standing
from spotune_trainer.supervisor.daemon import Stay
from spotune_trainer.supervisor.http_server import ProgressServer
from spotune_trainer.supervisor.job_watch import JobFile
from spotune_trainer.supervisor.pod_api import PodPages
from spotune_trainer.supervisor.pod_supervisor import PodSupervisor
from spotune_trainer.supervisor.preflight.checks import Preflight
from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError, RayJob
from tests.trainer.support.tiny import make_job
from tests.trainer.support.waiting import wait_until

_PATIENCE_SECONDS = 30.0
_SPEED = 50.0
"""Seconds of the supervisor in one of ours."""

Drive = Callable[["DriverlessRay"], "int | None"]
"""What becomes of an attempt: its exit code, None while it runs on."""


class DriverlessRay(JobsClient):
    """A head and its Jobs API at once; drivers are functions that are asked now and then what has become of them."""

    def __init__(self, directory: JobDirectory) -> None:
        super().__init__("http://ray", "secret")
        self.directory = directory
        self.is_away = False
        self.drive: Drive = trains
        self.jobs: dict[str, RayJob] = {}

    @property
    def attempts(self) -> int:
        return len(self.jobs)

    def find(self, submission_id: Any) -> Any:
        """As a head: what an earlier supervisor noted; as a Jobs API: one job."""
        if not isinstance(submission_id, str):
            return self.answers()
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
        return "what the driver said last"

    def answers(self) -> bool:
        return not self.is_away

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        return True

    def client(self) -> JobsClient:
        return self

    def record(self) -> dict[str, Any] | None:
        return None

    def end(self) -> None: ...

    def _refuse_while_away(self) -> None:
        if self.is_away:
            raise JobsUnavailableError("connection refused")


def trains(ray: DriverlessRay) -> int | None:
    """Train the model at once, as long as the job says."""
    job = job_of(ray.directory)
    assert job is not None
    length = {"epochs": job.spec.training.epochs, "maxSteps": job.spec.training.max_steps}
    files.write_json(ray.directory.result, length)
    _publish(ray, "Done")
    return 0


def heeds_a_stop(ray: DriverlessRay) -> int | None:
    """Train for ever, but commit and leave when told to."""
    _publish(ray, "Training")
    notice = files.read_json(ray.directory.notice)
    return 10 if notice is not None and notice["stop"] else None


def heeds_nothing(ray: DriverlessRay) -> int | None:
    """Train for ever."""
    _publish(ray, "Training")
    return None


def fails(ray: DriverlessRay) -> int | None:
    """End by the job's own fault."""
    _publish(ray, "Failed", "rank 0: no such column")
    return 20


def _publish(ray: DriverlessRay, phase: str, message: str | None = None) -> None:
    earlier = files.read_json(ray.directory.status) or {"heartbeat": 0}
    news = {"time": time.time(), "heartbeat": earlier["heartbeat"] + 1, "attempt": ray.attempts, "phase": phase}
    files.write_json(ray.directory.status, {**earlier, **news, "message": message}, durable=False)


class Pod:
    """One life of a supervisor's container; everything in it is real but Ray and the pace of time."""

    def __init__(self, root: Path, ray: DriverlessRay | None = None) -> None:
        self.job_path = root / "job.yaml"
        self.directory = JobDirectory(root / "data" / "job")
        self.ray = ray or DriverlessRay(self.directory)
        self.said: list[str] = []
        self.url = ""

    def write_job(self, source: Path | str, **sections: Any) -> str:
        """Mount a job file; its text."""
        text = make_job(source, **sections).model_dump_json(exclude_unset=True)
        self.job_path.write_text(text)
        return text

    def run(self, script: Callable[[], None]) -> SpotuneError | None:
        """Run the supervisor while `script` deals with it from outside, then end it by SIGTERM; what it raised."""
        errors: list[BaseException] = []

        def deal() -> None:
            try:
                self.until(lambda: bool(self.url), "it is served")
                script()
            except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
                errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

        dealer = threading.Thread(target=deal)
        dealer.start()
        outcome: SpotuneError | None = None
        try:
            self._live()
        except SpotuneError as error:
            outcome = error
        finally:
            dealer.join()
        if errors:
            raise AssertionError(f"{errors[0]}; it said {self.said[-5:]}") from errors[0]
        return outcome

    def _live(self) -> None:
        orders = Orders()
        standing = Standing(orders)
        job_file = JobFile(self.job_path, self.directory, standing, self.said.append, lambda: time.monotonic() * _SPEED)
        sleep = lambda seconds: time.sleep(seconds / _SPEED)  # noqa: E731
        supervisor = PodSupervisor(
            self.directory,
            job_file,
            Preflight(self.directory, standing),
            self.ray,
            PlainView(self.said.append),
            orders,
            standing,
            Timing(poll=0.02, hang_margin=0.2, end=0.5, silence=0.5),
            sleep,
        )
        stay = Stay(
            self.directory,
            supervisor.run,
            orders,
            standing,
            job_file.has_changed,
            self.said.append,
            sleep,
        )
        pages = PodPages(self.directory, orders, standing)
        with ProgressServer(self.directory, supervisor.sickness, pages=pages.pages, actions=pages.actions) as server:
            supervisor.url = self.url = server.url
            stay.until_told_to_leave()

    def progress(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/progress", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def supervisor(self) -> dict[str, Any]:
        found: dict[str, Any] = self.progress()["supervisor"]
        return found

    def state(self) -> str:
        return str(self.supervisor()["state"])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        assert wait_until(condition, _PATIENCE_SECONDS), f"waited too long until {what}"

    def until_state(self, state: str) -> dict[str, Any]:
        """What it says of itself in that state."""
        self.until(lambda: self.state() == state, f"{state}, it is {self.supervisor()}")
        return self.supervisor()

    def post(self, path: str, body: bytes = b"") -> dict[str, Any]:
        code, answer = request(f"{self.url}{path}", "POST", body)
        assert code == 200, answer
        found: dict[str, Any] = json.loads(answer)
        return found


def request(url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, str]:
    """Status and text of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body, method=method), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()
