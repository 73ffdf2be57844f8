"""One attempt as seen from outside: its state in Ray (`AttemptWatch`), and what it publishes (`RunWatch`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spotune.job import RetrySpec
from spotune_trainer import files
from spotune_trainer.job_directory.events import EventReader
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.logs.event_messages import startup_message, with_messages
from spotune_trainer.observability.surviving_workers import SurvivingWorkers
from spotune_trainer.supervisor.console import View
from spotune_trainer.supervisor.failure_policy import HeartbeatWatch
from spotune_trainer.supervisor.ray_head.head import RayHead
from spotune_trainer.supervisor.ray_head.jobs_client import JobsUnavailableError, RayJob


@dataclass(frozen=True)
class Timing:
    """Intervals and timeouts of a supervisor, in seconds.

    Attributes:
        poll: between two polls of the driver.
        hang_margin: added to `retry.hangTimeout`, within which the workers detect a hang themselves.
        notice: given to the workers to commit when the supervisor is terminated.
        stop: given to a driver to end after Ray was asked to stop it.
        unavailable: a Jobs API that does not answer for so long counts as lost, although its processes run.
    """

    poll: float = 0.5
    hang_margin: float = 60.0
    notice: float = 60.0
    stop: float = 20.0
    unavailable: float = 120.0


@dataclass(frozen=True)
class Attempt:
    """One driver.

    Attributes:
        number: counted from 1 over the life of the job directory.
        submission_id: of the driver in Ray.
    """

    number: int
    submission_id: str


class AttemptWatch:
    """Polls Ray for one attempt, and stops it."""

    def __init__(self, head: RayHead, attempt: Attempt, timing: Timing) -> None:
        self._head = head
        self._id = attempt.submission_id
        self._timing = timing
        self._client = head.client()
        self._last_response = time.monotonic()
        self._last_job = RayJob(self._id, "PENDING", None, "", {})
        self._stop_requested: float | None = None

    def poll(self) -> RayJob | None:
        """The attempt in Ray, or None if it is lost. While Ray does not answer, the last known state.

        Shuts the head down if Ray has not answered, or has not stopped the attempt, within the timeouts. The head of a
        cluster belongs to KubeRay and is left alone.
        """
        now = time.monotonic()
        overdue = self._stop_requested is not None and now - self._stop_requested > self._timing.stop
        if overdue or now - self._last_response > self._timing.unavailable:
            self._head.shut_down(spares_ranks=True)
        if not self._head.is_alive():
            return None
        try:
            job = self._client.find(self._id)
        except JobsUnavailableError:
            return self._last_job if self._head.is_alive() else None
        self._last_response = time.monotonic()
        if job is not None:
            self._last_job = job
        return job

    def stop(self) -> None:
        """Ask Ray once to stop the attempt; if that takes too long, `poll` shuts the head down."""
        if self._stop_requested is not None:
            return
        self._stop_requested = time.monotonic()
        try:
            self._client.stop(self._id)
        except JobsUnavailableError:
            self._head.shut_down(spares_ranks=True)


class RunWatch:
    """Reads the driver's status and the ledger's new events, shows them, and watches the heartbeat.

    Args:
        directory: of the job.
        retry: returns the job's current `retry` section; `hangTimeout` may change while the job runs.
        view: shows the run.
        hang_margin: seconds, see `Timing`.
        verbose: also show how long each part of the start-up took.

    Attributes:
        status: the last content of `status.json`; empty before there is one.
        highest_step: the highest step of any status so far.
        startup_seconds: durations of the start-up's parts that the supervisor measures, by name.
        heartbeat: of the driver.
    """

    def __init__(
        self,
        directory: JobDirectory,
        retry: Callable[[], RetrySpec],
        view: View,
        hang_margin: float,
        *,
        verbose: bool,
    ) -> None:
        self._directory = directory
        self._retry = retry
        self._view = view
        self._hang_margin = hang_margin
        self._show_startup = verbose
        self._events = EventReader(directory.ledger)
        self._surviving = SurvivingWorkers(directory)
        self.status: dict[str, Any] = {}
        self.highest_step = 0
        self.startup_seconds: dict[str, float] = {}
        self.heartbeat = HeartbeatWatch(self._hang_seconds(), time.monotonic())

    def skip_earlier_events(self) -> None:
        """Do not show the events that are in the ledger already."""
        self._events.read()

    def poll(self) -> None:
        """Read the status and new events, and show them."""
        self.heartbeat.timeout_seconds = self._hang_seconds()
        for _, text in with_messages(self._events.read()):
            if text:
                self._view.log(text)
        status = files.read_json(self._directory.status)
        if status is None:
            return
        self.status = status
        self.heartbeat.observe(status["heartbeat"], time.monotonic())
        self.highest_step = max(self.highest_step, status.get("step") or 0)
        self._view.show(self._shown(status))
        if self._show_startup and status["phase"] == "Training" and self._has_stepped():
            self._show_startup = False
            self._view.log(startup_message({**self.startup_seconds, **status.get("startup", {})}))

    def _shown(self, status: dict[str, Any]) -> dict[str, Any]:
        """The status, or what its workers do without the driver. A report that cannot be read does not end the job."""
        try:
            return self._surviving.shown(status, time.time() - status["time"])
        except files.UnreadableFileError:
            return status

    def _has_stepped(self) -> bool:
        return (self.status.get("step") or 0) > (self.status.get("resumedFromStep") or 0)

    def _hang_seconds(self) -> float:
        """A heartbeat that does not change for so long means a hang."""
        return self._retry().hang_timeout.seconds + self._hang_margin
