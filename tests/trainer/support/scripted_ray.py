"""A scripted Ray head, and a supervisor that runs over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from spotune.job import RetrySpec
from spotune.job.lifecycle import BackoffSpec
from spotune.units.durations import Duration
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.attempt import Timing
from spotune_trainer.supervisor.console import PlainView
from spotune_trainer.supervisor.control import ControlSignals
from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError, RayJob
from spotune_trainer.supervisor.supervisor import Supervisor

Act: TypeAlias = "int | Callable[[ScriptedRay], int | None]"
POLICY = RetrySpec(backoff=BackoffSpec(initial=Duration("0.01s"), max=Duration("0.01s")))


class ScriptedRay:
    """A head on which each submission plays the next act: an exit code, or a function."""

    def __init__(self, *acts: Act) -> None:
        self.acts = list(acts)
        self.jobs: dict[str, RayJob] = {}
        self.alive = False
        self.starts = 0
        self.notice: Path | None = None
        self.message = ""

    def reattach(self, record: Mapping[str, Any] | None) -> bool:
        return False

    def start(self) -> None:
        self.starts += 1
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive

    def is_responding(self) -> bool:
        return self.alive

    def client(self) -> JobsClient:
        return ScriptedJobs(self)

    def record(self) -> dict[str, Any] | None:
        return None

    def shut_down(self, *, spares_ranks: bool = False) -> None:
        self.alive = False
        self.jobs = {}


def cannot_start_the_driver(ray: ScriptedRay) -> int | None:
    """Ray accepts the submission, but runs nothing."""
    ray.message = "Failed to start supervisor actor:\n  ImportError: libarrow.so: cannot open shared object file"
    return 137


class ScriptedJobs(JobsClient):
    """The Jobs API of a scripted head."""

    def __init__(self, ray: ScriptedRay) -> None:
        super().__init__("http://nowhere", "secret")
        self.ray = ray

    def list_jobs(self) -> list[RayJob]:
        return list(self.ray.jobs.values())

    def find(self, submission_id: str) -> RayJob | None:
        job = self.ray.jobs.get(submission_id)
        if job is not None and self.ray.notice is not None and self.ray.notice.exists():
            return RayJob(submission_id, "FAILED", 10, "", job.metadata)
        return job

    def logs(self, submission_id: str) -> str:
        return "Traceback\nValueError: the last line of the driver"

    def submit(self, entrypoint: str, submission_id: str, metadata: Mapping[str, str]) -> None:
        act = self.ray.acts.pop(0)
        code = act if isinstance(act, int) else act(self.ray)
        status = "SUCCEEDED" if code == 0 else "FAILED" if code is not None else "RUNNING"
        self.ray.jobs[submission_id] = RayJob(submission_id, status, code, self.ray.message, metadata)
        self.ray.message = ""


def dies_at_submission(ray: ScriptedRay) -> int | None:
    """The head dies before it accepts the submission."""
    ray.alive = False
    raise JobsUnavailableError("connection refused")


def dies_while_running(ray: ScriptedRay) -> int | None:
    """The head dies while the driver runs."""
    ray.alive = False
    return None


class Run:
    """A supervisor over a scripted head; a call runs it. `policy` and `control` may change while it runs."""

    def __init__(self, root: Path, *acts: Act) -> None:
        self.directory = JobDirectory(root)
        self.ray = ScriptedRay(*acts)
        self.control = ControlSignals()
        self.policy = POLICY
        self.lines: list[str] = []

    def __call__(self, *, drain: bool = False, beside_head: bool = False) -> None:
        supervisor = Supervisor(
            self.directory,
            lambda: self.policy,
            self.ray,
            PlainView(self.lines.append),
            control=self.control,
            beside_head=beside_head,
            timing=Timing(poll=0.0),
        )
        if drain:
            supervisor.drain()
        supervisor.run("http://127.0.0.1:8090")

    def causes(self) -> list[str]:
        return [record["cause"] for record in Ledger(self.directory).records("failure")]

    def attempts(self) -> list[tuple[int, int | None]]:
        return [(record["attempt"], record["exitCode"]) for record in Ledger(self.directory).records("attempt-ended")]
