"""The supervisor of one job: submits a driver, watches it, and submits again until the model is trained.

The same class runs under `spotune run` with a private Ray head, and beside the head of a cluster. It keeps no state
that a restart would lose. The ledger numbers the attempts and Ray lists the running ones, so a new supervisor continues
with the attempt of a killed one (`recovery.py`). `failure_policy.py` decides what follows the exit of a driver.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable

from spotune.errors import InfrastructureError, JobError, SpotuneError, StoppedError, SupersededError
from spotune.job import RetrySpec
from spotune.retry import Failure
from spotune_trainer import files
from spotune_trainer.bucket.state_mirror import StateMirror
from spotune_trainer.job_directory.job import has_finished
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.supervisor.attempt import Attempt, AttemptWatch, RunWatch, Timing
from spotune_trainer.supervisor.console import View
from spotune_trainer.supervisor.control import ControlSignals
from spotune_trainer.supervisor.failure_policy import (
    DriverExit,
    ExitSupervisor,
    Resubmit,
    classify_driver_exit,
    failure_cause,
    next_action,
)
from spotune_trainer.supervisor.ray_head.head import RayHead
from spotune_trainer.supervisor.ray_head.jobs_client import JobsUnavailableError, RayJob
from spotune_trainer.supervisor.recovery import ATTEMPT_KEY, DIRECTORY_KEY, Recovery, record_failure
from spotune_trainer.supervisor.signals import (
    LeaveAtOnceError,
    StopRequest,
    ignore_signals,
    terminate_or_leave_on_signal,
)

_MAX_LOG_LINES = 3
_MAX_MESSAGE_LENGTH = 300


class Supervisor:
    """Runs one job until its model is trained. The caller holds the lock of the directory.

    Args:
        directory: of the job; contains `job.json`.
        retry: returns the job's current `retry` section; called at each poll, because it may change.
        head: the Ray head to use.
        view: shows the run.
        control: requests to the supervisor; SIGTERM and SIGINT request termination, so `run` needs the main thread.
        beside_head: whether the supervisor runs in the head's pod, so that its termination is the loss of the head.
        command: returns the driver's command line for the number of an attempt; None for the driver of this package.
        timing: intervals and timeouts.
        verbose: also show how long each part of the start-up took.
        mirror: keeps the state in the bucket; None if the directory is the storage.
    """

    def __init__(
        self,
        directory: JobDirectory,
        retry: Callable[[], RetrySpec],
        head: RayHead,
        view: View,
        *,
        control: ControlSignals | None = None,
        beside_head: bool = False,
        command: Callable[[int], list[str]] | None = None,
        timing: Timing | None = None,
        verbose: bool = False,
        mirror: StateMirror | None = None,
    ) -> None:
        self._directory = directory
        self._retry = retry
        self._head = head
        self._view = view
        self._control = control or ControlSignals()
        self._command = command or self._driver_command
        self._timing = timing or Timing()
        self._ledger = Ledger(directory)
        self._stop = StopRequest(directory, self._control, view, self._timing.notice, beside_head=beside_head)
        self._watch = RunWatch(directory, retry, view, self._timing.hang_margin, verbose=verbose)
        self._mirror = mirror
        self._failures: list[Failure] = []

    def drain(self) -> None:
        """Before `run`: start no attempt, and stop the one that still runs, if there is one."""
        self._stop.drain()

    @property
    def is_stopping(self) -> bool:
        """Whether no further attempt starts in this run, even if the job is resumed meanwhile."""
        return self._stop.is_pending

    def run(self, url: str) -> None:
        """Train until the model is trained. If it is already, clean up what a killed supervisor left behind.

        Args:
            url: where progress is served, for `supervisor.json`.

        Raises:
            JobError: the user's model, data or configuration is at fault.
            StoppedError: a stop was requested.
            InfrastructureError: Ray cannot be started, or drivers crash again and again.
            SupersededError: another run of the job has taken over.
        """
        startup_seconds = self._watch.startup_seconds
        recovery = Recovery(self._directory, self._head, self._view, self._stop, self._timing, startup_seconds, url)
        with terminate_or_leave_on_signal(self._control):
            self._watch.skip_earlier_events()
            try:
                with self._view:
                    self._run_attempts(recovery)
            except LeaveAtOnceError:
                raise StoppedError("left at once; the same command continues from the last commit") from None
            finally:
                ignore_signals()
                self._head.shut_down()
                self._directory.supervisor.unlink(missing_ok=True)
                if self._stop.is_pending and not self._stop.loses_head:
                    self._ledger.append("stopped")

    def health_problem(self) -> str | None:
        """Why the driver looks hung; None while it is healthy."""
        now, heartbeat = time.monotonic(), self._watch.heartbeat
        return f"no heartbeat for {heartbeat.age_seconds(now):.0f} s" if heartbeat.is_stale(now) else None

    def _run_attempts(self, recovery: Recovery) -> None:
        attempt = recovery.bring_up()
        while attempt is not None or not has_finished(self._directory):
            if attempt is None:
                self._stop.raise_if_pending()
                attempt = self._submit(recovery)
            driver_exit, job = self._wait_for_exit(attempt)
            self._watch.poll()
            action = self._conclude(attempt, driver_exit, job)
            if isinstance(action, ExitSupervisor):
                self._raise_for(action.exit_code, attempt)
                return
            self._back_off(action.after_seconds)
            attempt = None

    def _submit(self, recovery: Recovery) -> Attempt:
        """Start the next attempt."""
        recovery.ensure_head()
        self._publish_starting()
        started = time.monotonic()
        number = 1 + max((record["attempt"] for record in self._ledger.records("attempt-started")), default=0)
        attempt = Attempt(number, f"spotune-{number}-{time.time_ns():x}")
        self._directory.notice.unlink(missing_ok=True)
        self._ledger.append("attempt-started", attempt=number)
        if self._mirror is not None:
            self._mirror.push()  # so that no other machine uses this number again
        metadata = {DIRECTORY_KEY: str(self._directory.root), ATTEMPT_KEY: str(number)}
        entrypoint = f"exec {shlex.join(self._command(number))}"
        try:
            recovery.call(lambda client: client.submit(entrypoint, attempt.submission_id, metadata))
        except JobsUnavailableError as error:  # Ray has no record of the attempt, so its watch reports it as vanished
            self._view.log(f"Ray did not accept attempt {number}: {error}")
        self._watch.startup_seconds["submit"] = time.monotonic() - started
        return attempt

    def _publish_starting(self) -> None:
        """Replace the phase of the last driver, because the next one publishes nothing for some seconds."""
        status = files.read_json(self._directory.status)
        if status is not None:
            changes = {"phase": Phase.STARTING.value, "etaSeconds": None, "time": time.time()}
            files.write_json(self._directory.status, {**status, **changes}, durable=False)

    def _driver_command(self, number: int) -> list[str]:
        module = [sys.executable, "-m", "spotune_trainer.driver"]
        return [*module, "--directory", str(self._directory.root), "--attempt", str(number)]

    def _wait_for_exit(self, attempt: Attempt) -> tuple[DriverExit, RayJob | None]:
        """Watch an attempt until it exits, and stop it if it hangs or ignores a stop. Returns how it ended."""
        heartbeat = self._watch.heartbeat
        heartbeat.restart(time.monotonic())
        in_ray = AttemptWatch(self._head, attempt, self._timing)
        hung = False
        commit_step: int | None = None
        while True:
            self._watch.poll()
            self._stop_if_superseded(in_ray)
            self._stop.notify_workers()
            if self._stop.loses_head:
                commit_step = self._watch.status.get("step") or 0 if commit_step is None else commit_step
                self._leave_workers_after_commit(commit_step)
            if not hung and heartbeat.is_stale(time.monotonic()):
                hung = True
                age = heartbeat.age_seconds(time.monotonic())
                self._view.log(f"no heartbeat for {age:.0f} s: stopping the driver")
                in_ray.stop()
            if self._stop.is_overdue:
                in_ray.stop()
            job = in_ray.poll()
            driver_exit = classify_driver_exit(job, hung=hung)
            if driver_exit is not None:
                return driver_exit, job
            time.sleep(self._timing.poll)

    def _stop_if_superseded(self, in_ray: AttemptWatch) -> None:
        """Stop the driver if another supervisor has taken over the bucket, and wait until it has ended.

        Raises:
            SupersededError: it has.
        """
        try:
            if self._mirror is not None:
                self._mirror.raise_if_superseded()
        except SupersededError:
            in_ray.stop()
            deadline = time.monotonic() + self._timing.stop
            while time.monotonic() < deadline and (job := in_ray.poll()) is not None and not job.has_ended:
                time.sleep(self._timing.poll)
            raise

    def _leave_workers_after_commit(self, step: int) -> None:
        """Leave the driver and its workers to the end of the head, once they need nothing more of it.

        Raises:
            StoppedError: the workers have committed `step`, or there is nothing to commit.
        """
        status = self._watch.status
        is_training = status.get("phase") in (Phase.TRAINING, Phase.EVALUATING)
        committed = (status.get("lastCheckpoint") or {}).get("step", 0)
        if not is_training or committed >= step or self._stop.is_overdue:
            raise StoppedError("the head ends; its workers train on, and the next head continues with them")

    def _conclude(self, attempt: Attempt, driver_exit: DriverExit, job: RayJob | None) -> Resubmit | ExitSupervisor:
        """Record the exit of an attempt, and decide what follows."""
        self._ledger.append("attempt-ended", attempt=attempt.number, exitCode=job.exit_code if job else None)
        stopping = self._stop.is_pending
        step = self._watch.highest_step
        if driver_exit not in (DriverExit.DONE, DriverExit.FAILED, DriverExit.SUPERSEDED) and not stopping:
            failure = Failure(failure_cause(driver_exit), step, time.time(), self._reason(attempt, driver_exit, job))
            self._failures.append(failure)
            if driver_exit is not DriverExit.INFRASTRUCTURE:  # the driver has recorded that one itself
                record_failure(self._directory, failure.cause, failure.message, failure.step)
        return next_action(driver_exit, self._failures, self._retry(), now=time.time(), stopping=stopping)

    def _reason(self, attempt: Attempt, driver_exit: DriverExit, job: RayJob | None) -> str:
        match driver_exit:
            case DriverExit.HUNG:
                return f"no heartbeat for {self._watch.heartbeat.timeout_seconds:.0f} s"
            case DriverExit.CRASHED:
                return f"the driver crashed: {self._failure_message(attempt)}"
            case DriverExit.VANISHED if job is not None and job.message:
                message = " ".join(job.message.split())
                return f"the driver was killed, or Ray could not start it: {message[:_MAX_MESSAGE_LENGTH]}"
            case DriverExit.VANISHED:
                return "the driver was killed, or its Ray head died"
        return str(self._watch.status.get("message") or "infrastructure")

    def _back_off(self, seconds: float) -> None:
        """Wait before the next attempt; a stop request ends the wait."""
        if seconds > 0:
            self._view.log(f"retrying in {seconds:.0f} s")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._stop.raise_if_pending()
            self._watch.heartbeat.restart(time.monotonic())  # no driver runs that could beat
            time.sleep(min(self._timing.poll, max(0.0, until - time.monotonic())))

    def _raise_for(self, exit_code: int, attempt: Attempt) -> None:
        """Raise the error of an exit code; none for a trained model."""
        if exit_code == 0:
            return
        kinds: dict[int, type[SpotuneError]] = {
            kind.exit_code: kind for kind in (JobError, InfrastructureError, SupersededError)
        }
        if exit_code == InfrastructureError.exit_code:
            self._stop.raise_if_pending()
        raise kinds[exit_code](self._failure_message(attempt))

    def _failure_message(self, attempt: Attempt) -> str:
        """Why an attempt failed: the message in its status, or else the last lines of its log."""
        status = self._watch.status
        if status.get("attempt") == attempt.number and status.get("message"):
            return str(status["message"])
        try:
            log = self._head.client().logs(attempt.submission_id) if self._head.is_alive() else ""
        except JobsUnavailableError:
            log = ""
        lines = [line for line in log.splitlines() if line.strip()][-_MAX_LOG_LINES:]
        return "\n".join(lines) or f"attempt {attempt.number} left no message; see {self._directory.logs}"
