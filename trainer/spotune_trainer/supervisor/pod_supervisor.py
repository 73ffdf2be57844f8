"""One run of a pod's supervisor, from reading the job file to the trained model; `SupervisorDaemon` repeats it.

The preflight comes before the first attempt and before anything is written to the job's folder. While attempts run, the
job file is polled for changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from spotune.errors import InfrastructureError, StoppedError
from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.bucket.state_mirror import DATA, StateMirror, mirrored
from spotune_trainer.job_directory.job import is_trained
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.lock import locked_if_possible
from spotune_trainer.job_directory.status import Phase, publish_phase
from spotune_trainer.supervisor.attempt import Timing
from spotune_trainer.supervisor.console import View
from spotune_trainer.supervisor.control import ControlSignals, SupervisorState, SupervisorStatus
from spotune_trainer.supervisor.job_watch import JobFile, put_changed_job
from spotune_trainer.supervisor.preflight.admission import check_directory, check_fingerprint
from spotune_trainer.supervisor.preflight.bucket import pull_to_pod
from spotune_trainer.supervisor.preflight.checks import BUCKET
from spotune_trainer.supervisor.preflight.result import CheckResult
from spotune_trainer.supervisor.preflight.runner import Preflight
from spotune_trainer.supervisor.ray_head.head import RayHead
from spotune_trainer.supervisor.supervisor import Supervisor

PREFLIGHT_RETRY_SECONDS = 30.0
_LOCK_TIMEOUT_SECONDS = 30.0
_POLL_SECONDS = 0.5


class PodSupervisor:
    """Trains one job on the Ray head of its pod.

    Args:
        directory: of the job.
        job_file: source of the job.
        preflight: runs the checks before the first attempt.
        head: the Ray head of the pod.
        view: shows the run.
        control: requests to the supervisor.
        status: set to what the supervisor is doing.
        timing: intervals and timeouts.
        sleep: waits for some seconds.
        bucket: URL of the bucket that keeps the job; empty: the directory, on a shared volume, does.
    """

    def __init__(
        self,
        directory: JobDirectory,
        job_file: JobFile,
        preflight: Preflight,
        head: RayHead,
        view: View,
        control: ControlSignals,
        status: SupervisorStatus,
        timing: Timing | None = None,
        sleep: Callable[[float], None] = time.sleep,
        bucket: str = "",
    ) -> None:
        self._directory = directory
        self._job_file = job_file
        self._preflight = preflight
        self._head = head
        self._view = view
        self._control = control
        self._status = status
        self._status.is_run_stopping = self.is_stopping
        self._timing = timing
        self._sleep = sleep
        self._bucket = bucket
        self._mirror: StateMirror | None = None
        self._supervisor: Supervisor | None = None
        self._passed_for = ""
        self.url = ""
        """Where progress is served; set once the server runs."""

    def run(self) -> None:
        """Train until the model is trained.

        Raises:
            StoppedError: a stop was requested, and nothing runs.
            JobError, InfrastructureError, SupersededError: as in `Supervisor.run`.
            UsageError: the folder of the job cannot be used, or the job file does not exist.
        """
        job, bucket = self._job_file.read(), None
        if self._bucket:
            job, bucket = self._pull_state(job)
        check_fingerprint(self._directory, job)
        if is_trained(self._directory, job):
            return
        if self._control.stopping and not self._directory.job.exists():
            raise StoppedError("stopped before the first attempt")
        job = self._pass_preflight(job)
        check_directory(self._directory, job)
        with (
            locked_if_possible(self._directory, _LOCK_TIMEOUT_SECONDS, self._view.log),
            mirrored(bucket, self._directory, self._view.log, DATA) as self._mirror,
        ):
            put_changed_job(self._directory, job)
            if not self._status.preflight.passed:
                self._drain()
            self._preflight.record()
            while not is_trained(self._directory, self._job_file.current()):
                self._wait_for_ray()
                self._supervise()

    def is_stopping(self) -> bool:
        """Whether an attempt may still run that no other one follows."""
        supervisor = self._supervisor
        return supervisor is not None and supervisor.is_stopping

    def health_problem(self) -> str | None:
        """Why the driver looks hung; None while it is healthy or no driver runs."""
        supervisor = self._supervisor
        return supervisor.health_problem() if supervisor is not None else None

    def _pull_state(self, job: FinetuneJob) -> tuple[FinetuneJob, Bucket]:
        """Download what earlier runs left in the bucket; repeated until it can be read. Returns the newest job, too."""
        while True:
            try:
                return job, pull_to_pod(self._bucket, self._directory)
            except InfrastructureError as error:
                problem = str(error)
            self._status.preflight.checks = (CheckResult(BUCKET, "failed", problem),)
            self._view.log(f"{problem}; retrying in {PREFLIGHT_RETRY_SECONDS:.0f} s")
            self._status.set(SupervisorState.PREFLIGHT, problem)
            self._wait_for_change(PREFLIGHT_RETRY_SECONDS)
            if self._control.stopping:
                raise StoppedError("stopped before the state could be read from the bucket")
            job = self._job_file.read()

    def _pass_preflight(self, job: FinetuneJob) -> FinetuneJob:
        """Repeat the preflight until it passes, and return the job that passed.

        After a stop request the job is returned unchecked, because an earlier supervisor's attempt may still run.
        """
        while not self._control.stopping and self._passed_for != fingerprint(job):
            self._status.set(SupervisorState.PREFLIGHT)
            if self._preflight.passes(job):
                self._passed_for = fingerprint(job)
                self._view.log("preflight passed")
                break
            failures = self._preflight.failures()
            self._view.log(f"preflight failed: {failures}; retrying in {PREFLIGHT_RETRY_SECONDS:.0f} s")
            self._status.set(SupervisorState.PREFLIGHT, failures)
            self._wait_for_change(PREFLIGHT_RETRY_SECONDS)
            job = self._job_file.read()
            check_fingerprint(self._directory, job)
        return job

    def _wait_for_change(self, seconds: float) -> None:
        """Wait for some seconds, or until the job file changes or a stop is requested."""
        waited = 0.0
        while waited < seconds and not self._control.stopping and not self._job_file.has_changed():
            self._sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
        if self._control.stopping and not self._directory.job.exists():
            raise StoppedError("stopped before the first attempt")

    def _wait_for_ray(self) -> None:
        """Wait until Ray responds. After a stop request `Supervisor` itself asks Ray whether an attempt still runs."""
        while not self._control.stopping and not self._head.is_responding():
            self._status.set(SupervisorState.WAITING, f"Ray does not answer yet at {self._head.client().url}")
            self._job_file.current()
            self._sleep(_POLL_SECONDS)

    def _drain(self) -> None:
        """Stop an attempt that an earlier supervisor left running; before the preflight passed, none may start."""
        supervisor = self._new_supervisor()
        supervisor.drain()
        self._run(supervisor)
        raise StoppedError("stopped; the last attempt had trained the model")

    def _supervise(self) -> None:
        self._status.set(SupervisorState.RUNNING)
        if (files.read_json(self._directory.status) or {}).get("phase") in (Phase.FAILED, Phase.DONE):
            publish_phase(self._directory, Phase.STARTING, None)
        self._run(self._new_supervisor())

    def _new_supervisor(self) -> Supervisor:
        return Supervisor(
            self._directory,
            lambda: self._job_file.current().spec.retry,
            self._head,
            self._view,
            control=self._control,
            beside_head=True,
            timing=self._timing,
            mirror=self._mirror,
        )

    def _run(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        try:
            supervisor.run(self.url)
        except StoppedError:
            if not self._control.terminating:  # the job may be resumed, and what its last driver wrote is over
                publish_phase(self._directory, Phase.STARTING, None)
            raise
        finally:
            self._supervisor = None
