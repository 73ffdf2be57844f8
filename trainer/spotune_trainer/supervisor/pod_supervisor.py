"""What the supervisor of a pod does from reading its job file to the trained model; `Stay` has it done again and again.

Preflight comes before the first attempt, and before anything is put into the job's folder. While attempts run, the job
file is read again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.job_directory.job import check_directory, check_meaning, is_trained
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.lock import locked_if_possible
from spotune_trainer.observability.progress import Phase
from spotune_trainer.supervisor.attempt import RayHead, Timing
from spotune_trainer.supervisor.console import View
from spotune_trainer.supervisor.control import Orders, Standing, State
from spotune_trainer.supervisor.daemon import publish_phase
from spotune_trainer.supervisor.job_watch import JobFile, put_changed_job
from spotune_trainer.supervisor.preflight.checks import Preflight
from spotune_trainer.supervisor.supervisor import StoppedError, Supervisor

PREFLIGHT_AGAIN_SECONDS = 30.0
_SECONDS_FOR_THE_LOCK = 30.0
_POLL_SECONDS = 0.5


class AnsweringRay(RayHead, Protocol):
    """A Ray that somebody else keeps running, and that may be away."""

    def answers(self) -> bool:
        """Whether it answers now."""


class PodSupervisor:
    """Trains one job on the Ray of its pod.

    Args:
        directory: of the job.
        job_file: that the job is read from.
        preflight: what comes before the first attempt.
        head: the Ray of the pod.
        view: what to show the run on.
        orders: what it is to do.
        standing: told what it is doing.
        timing: how long things may take.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        directory: JobDirectory,
        job_file: JobFile,
        preflight: Preflight,
        head: AnsweringRay,
        view: View,
        orders: Orders,
        standing: Standing,
        timing: Timing | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory = directory
        self._job_file = job_file
        self._preflight = preflight
        self._head = head
        self._view = view
        self._orders = orders
        self._standing = standing
        self._timing = timing
        self._sleep = sleep
        self._supervisor: Supervisor | None = None
        self._passed_for = ""
        self.url = ""
        """Where progress is served; set once it is."""

    def run(self) -> None:
        """Train until the model is trained.

        Raises:
            StoppedError: it was told to stop, and nothing runs.
            JobError, InfrastructureError, SupersededError: as of `Supervisor.run`.
            UsageError: the folder of the job cannot be used, or there is no job file.
        """
        job = self._job_file.read()
        check_meaning(self._directory, job)
        if is_trained(self._directory, job):
            return
        if self._orders.stopping and not self._directory.job.exists():
            raise StoppedError("stopped before the first attempt")
        job = self._pass_preflight(job)
        check_directory(self._directory, job)
        with locked_if_possible(self._directory, _SECONDS_FOR_THE_LOCK, self._view.say):
            put_changed_job(self._directory, job)
            if not self._standing.passed:
                self._drain()
            self._preflight.record()
            while not is_trained(self._directory, self._job_file.current()):
                self._wait_for_ray()
                self._supervise()

    def sickness(self) -> str | None:
        """Why it is not well; None while it is, or while nothing runs that could be ill."""
        supervisor = self._supervisor
        return supervisor.sickness() if supervisor is not None else None

    def _pass_preflight(self, job: FinetuneJob) -> FinetuneJob:
        """The job that passed. One that is to stop is let through: an attempt of an earlier life may still run."""
        while not self._orders.stopping and self._passed_for != fingerprint(job):
            self._standing.say(State.PREFLIGHT)
            if self._preflight.passes(job):
                self._passed_for = fingerprint(job)
                self._view.say("preflight passed")
                break
            failures = self._preflight.failures()
            self._view.say(f"preflight: {failures}; once more in {PREFLIGHT_AGAIN_SECONDS:.0f} s")
            self._standing.say(State.PREFLIGHT, failures)
            self._wait_for_a_change(PREFLIGHT_AGAIN_SECONDS)
            job = self._job_file.read()
            check_meaning(self._directory, job)
        return job

    def _wait_for_a_change(self, seconds: float) -> None:
        """Wait, but not on when the job file has changed, or when told to stop."""
        waited = 0.0
        while waited < seconds and not self._orders.stopping and not self._job_file.has_changed():
            self._sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
        if self._orders.stopping and not self._directory.job.exists():
            raise StoppedError("stopped before the first attempt")

    def _wait_for_ray(self) -> None:
        """Until it answers; when told to stop the supervisor itself finds out whether anything runs there."""
        while not self._orders.stopping and not self._head.answers():
            self._standing.say(State.WAITING, f"Ray does not answer yet at {self._head.client().url}")
            self._job_file.current()
            self._sleep(_POLL_SECONDS)

    def _drain(self) -> None:
        """End what an earlier life of this supervisor has left running; without preflight nothing new may start."""
        supervisor = self._new_supervisor()
        supervisor.drain()
        self._run(supervisor)
        raise StoppedError("stopped; the last attempt had trained the model")

    def _supervise(self) -> None:
        self._standing.say(State.RUNNING)
        if (files.read_json(self._directory.status) or {}).get("phase") in (Phase.FAILED, Phase.DONE):
            publish_phase(self._directory, Phase.STARTING, None)
        self._run(self._new_supervisor())

    def _new_supervisor(self) -> Supervisor:
        return Supervisor(
            self._directory,
            lambda: self._job_file.current().spec.retry,
            self._head,
            self._view,
            orders=self._orders,
            beside_head=True,
            timing=self._timing,
        )

    def _run(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        try:
            supervisor.run(self.url)
        finally:
            self._supervisor = None
