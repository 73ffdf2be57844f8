"""Recovery at the start of a supervisor: brings up a Ray head, finds running attempts, and closes abandoned ones.

An earlier supervisor may have been killed at any time. Its head may still run (`supervisor.json` records it), with a
driver in it. Its ledger may contain attempts whose exit nobody recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.job_directory.job import has_finished
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.attempt import Attempt, Timing
from spotune_trainer.supervisor.console import View
from spotune_trainer.supervisor.failure_policy import DriverExit, classify_driver_exit, failure_cause
from spotune_trainer.supervisor.ray_head.head import RayHead
from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError, RayJob
from spotune_trainer.supervisor.signals import StopRequest

DIRECTORY_KEY = "spotune-directory"
ATTEMPT_KEY = "spotune-attempt"
"""Metadata of a submission: the job's directory, and the number of the attempt."""

_Result = TypeVar("_Result")


class Recovery:
    """Gives a supervisor a working Ray head, and completes what an earlier supervisor left unfinished.

    Args:
        directory: of the job.
        head: the head to bring up.
        view: shows the run.
        stop: polled while the Jobs API does not answer.
        timing: intervals and timeouts.
        startup_seconds: gets the duration of Ray's start as `ray`.
        url: where progress is served, for `supervisor.json`.
    """

    def __init__(
        self,
        directory: JobDirectory,
        head: RayHead,
        view: View,
        stop: StopRequest,
        timing: Timing,
        startup_seconds: dict[str, float],
        url: str,
    ) -> None:
        self._directory = directory
        self._head = head
        self._view = view
        self._stop = stop
        self._timing = timing
        self._startup_seconds = startup_seconds
        self._url = url
        self._ledger = Ledger(directory)

    def bring_up(self) -> Attempt | None:
        """Reattach to the earlier head or start a new one; returns the attempt that runs in it, if there is one."""
        earlier = files.read_json(self._directory.supervisor) or {}
        if not self._head.reattach(earlier.get("ray")):
            if has_finished(self._directory):
                self._close_attempts({})
                return None
            self._start_head()
        self._record_supervisor()
        jobs = self._known_jobs()
        self._close_attempts(jobs)
        newest = max((number for number, job in jobs.items() if not job.has_ended), default=None)
        if newest is None:
            return None
        self._view.log(f"continuing with attempt {newest}, which still runs")
        return Attempt(newest, jobs[newest].submission_id)

    def ensure_head(self) -> None:
        """Start a new head if the present one is not alive."""
        if not self._head.is_alive():
            self._head.shut_down(spares_ranks=True)
            self._start_head()
            self._record_supervisor()

    def call(self, request: Callable[[JobsClient], _Result]) -> _Result:
        """Send a request to the Jobs API, and repeat it while a head that has just started does not answer.

        Raises:
            JobsUnavailableError: the head is not alive, or has not answered within `Timing.unavailable`.
        """
        client = self._head.client()
        deadline = time.monotonic() + self._timing.unavailable
        while True:
            try:
                return request(client)
            except JobsUnavailableError:
                if time.monotonic() > deadline or not self._head.is_alive():
                    raise
                self._stop.notify_workers()
                time.sleep(self._timing.poll)

    def _start_head(self) -> None:
        started = time.monotonic()
        self._view.log("starting Ray")
        self._head.start()
        self._startup_seconds["ray"] = time.monotonic() - started

    def _record_supervisor(self) -> None:
        record = {"pid": os.getpid(), "time": time.time(), "url": self._url, "ray": self._head.record()}
        files.write_json(self._directory.supervisor, record)

    def _known_jobs(self) -> dict[int, RayJob]:
        """The attempts of this job that Ray has a record of, running or ended, by their number."""
        return {
            int(job.metadata[ATTEMPT_KEY]): job
            for job in self.call(lambda client: client.list_jobs())
            if job.metadata.get(DIRECTORY_KEY) == str(self._directory.root)
        }

    def _close_attempts(self, jobs: Mapping[int, RayJob]) -> None:
        """Record the exit of attempts that ended while no supervisor ran, as when both were lost with the head."""
        status = files.read_json(self._directory.status) or {}
        step, status_time = status.get("step") or 0, status.get("time")
        for number, finished in self._ledger.open_attempts().items():
            job = jobs.get(number)
            driver_exit = classify_driver_exit(job)
            if driver_exit is None:
                continue
            exit_code = 0 if finished else job.exit_code if job else None
            self._ledger.append("attempt-ended", attempt=number, exitCode=exit_code, lastSeen=status_time)
            if driver_exit is DriverExit.VANISHED and not finished:
                message = "the head was lost, or the driver together with the supervisor"
                record_failure(self._directory, failure_cause(driver_exit), message, step)


def record_failure(directory: JobDirectory, cause: FailureCause, message: str, step: int) -> None:
    """Append a failure of the newest generation to the ledger."""
    generation = (files.read_json(directory.status) or {}).get("generation", 0)
    Ledger(directory).append("failure", generation=generation, cause=str(cause), message=message, step=step)
