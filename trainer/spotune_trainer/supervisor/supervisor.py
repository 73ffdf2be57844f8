"""The supervisor of one job: submits the driver, watches it, and submits it again until the model is trained.

The same class runs under `spotune run` with a private Ray, and beside the head in a cluster. It holds no state that
matters: the ledger numbers the attempts, Ray knows what runs, and a new supervisor goes on with the attempt of one that
was killed. What it decides is in `attempts.py`; this is the part with hands.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from spotune.errors import InfrastructureError, JobError, SpotuneError, SupersededError
from spotune.job import RetrySpec
from spotune.retry import Failure, FailureCause
from spotune_trainer import files
from spotune_trainer.files import LineReader
from spotune_trainer.job_directory.job import has_finished
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.observability.logs.event_messages import sentence, startup
from spotune_trainer.observability.progress import Phase
from spotune_trainer.supervisor.attempt import Attempt, RayHead, Timing, WatchedAttempt
from spotune_trainer.supervisor.console import View
from spotune_trainer.supervisor.control import Orders
from spotune_trainer.supervisor.failure_policy import (
    Ending,
    HeartbeatWatch,
    Leave,
    SubmitAgain,
    cause_of,
    ending_of,
    next_move,
)
from spotune_trainer.supervisor.ray_head.jobs_client import JobsUnavailableError, RayJob

_LAST_LINES = 3
_Answer = TypeVar("_Answer")


class StoppedError(InfrastructureError):
    """The supervisor left because it was told to."""


class Supervisor:
    """Runs one job to its end. The caller holds the directory's lock.

    Args:
        directory: of the job; `job.json` is in it.
        retry: the job's `retry` section as it is by now; asked for at every look, so it may change.
        head: the Ray to use.
        view: what to show the run on.
        orders: what it is to do; a signal, of the process in whose main thread it runs, is an order to leave.
        beside_head: whether it lives in the head's pod, and is told to leave when that one goes: a lost head.
        command: the driver's command line for the number of an attempt; None for our driver.
        timing: how long things may take.
        verbose: also say where the time of the start-up went.
    """

    def __init__(
        self,
        directory: JobDirectory,
        retry: Callable[[], RetrySpec],
        head: RayHead,
        view: View,
        *,
        orders: Orders | None = None,
        beside_head: bool = False,
        command: Callable[[int], list[str]] | None = None,
        timing: Timing | None = None,
        verbose: bool = False,
    ) -> None:
        self._directory = directory
        self._retry = retry
        self._head = head
        self._view = view
        self._orders = orders or Orders()
        self._beside_head = beside_head
        self._command = command or self._driver_command
        self._timing = timing or Timing()
        self._verbose = verbose
        self._ledger = Ledger(directory)
        self._events = LineReader(directory.ledger)
        self._heartbeat = HeartbeatWatch(self._hang_seconds(), time.monotonic())
        self._failures: list[Failure] = []
        self._status: dict[str, Any] = {}
        self._highest_step = 0
        self._startup: dict[str, float] = {}
        self._said_startup = not verbose
        self._draining = False
        self._stop_until: float | None = None

    def drain(self) -> None:
        """Before `run`: start no attempt, and stop the one that still runs, if there is one."""
        self._draining = True

    def run(self, url: str) -> None:
        """Train until the model is trained; if it is, end what a supervisor that was killed has left.

        Args:
            url: where progress is served, for `supervisor.json`.

        Raises:
            JobError: the user's model, data or configuration is at fault.
            StoppedError: it was told to stop.
            InfrastructureError: Ray cannot be started, or drivers crash again and again.
            SupersededError: another run of the job has taken over.
        """
        with self._signals():
            self._events.read()
            try:
                with self._view:
                    self._run_attempts(self._bring_up(url), url)
            except _LeaveNow:
                raise StoppedError("left at once; the same command goes on from the last commit") from None
            finally:
                _ignore_signals()
                self._head.end()
                self._directory.supervisor.unlink(missing_ok=True)
                if self._is_stopping() and not self._goes_with_head():
                    self._ledger.append("stopped")

    def sickness(self) -> str | None:
        """Why it is not well: the driver gives no sign of life; None while it is."""
        now = time.monotonic()
        return f"no heartbeat for {self._heartbeat.age_seconds(now):.0f} s" if self._heartbeat.is_stale(now) else None

    def _run_attempts(self, attempt: Attempt | None, url: str) -> None:
        while attempt is not None or not has_finished(self._directory):
            if attempt is None:
                self._leave_if_asked()
                attempt = self._submit(url)
            ending, exit_code = self._watch(attempt)
            self._look()
            move = self._conclude(attempt, ending, exit_code)
            if isinstance(move, Leave):
                self._raise_for(move.exit_code, attempt)
                return
            self._wait(move)
            attempt = None

    # Ray

    def _bring_up(self, url: str) -> Attempt | None:
        """Have a Ray, an earlier one or a new one; the attempt that runs in it already, if there is one."""
        earlier = files.read_json(self._directory.supervisor) or {}
        if not self._head.find(earlier.get("ray")):
            if has_finished(self._directory):
                self._close_attempts({})
                return None
            self._start_head()
        self._record(url)
        jobs = self._known_jobs()
        self._close_attempts(jobs)
        newest = max((number for number, job in jobs.items() if not job.has_ended), default=None)
        if newest is None:
            return None
        self._view.say(f"going on with attempt {newest}, which still runs")
        return Attempt(newest, jobs[newest].submission_id)

    def _start_head(self) -> None:
        started = time.monotonic()
        self._view.say("starting Ray")
        self._head.start()
        self._startup["ray"] = time.monotonic() - started

    def _record(self, url: str) -> None:
        record = {"pid": os.getpid(), "time": time.time(), "url": url, "ray": self._head.record()}
        files.write_json(self._directory.supervisor, record)

    def _known_jobs(self) -> dict[int, RayJob]:
        """The attempts of this job that Ray knows, ended or not, by their number."""
        return {
            int(job.metadata["spotune-attempt"]): job
            for job in self._patiently(self._head.client().list_jobs)
            if job.metadata.get("spotune-directory") == str(self._directory.root)
        }

    def _close_attempts(self, jobs: Mapping[int, RayJob]) -> None:
        """Record the end of attempts that no supervisor was there to see: a lost head takes its own along."""
        status = files.read_json(self._directory.status) or {}
        step, last_seen = status.get("step") or 0, status.get("time")
        for number, finished in self._ledger.open_attempts().items():
            job = jobs.get(number)
            ending = ending_of(job)
            if ending is None:
                continue
            exit_code = 0 if finished else job.exit_code if job else None
            self._ledger.append("attempt-ended", attempt=number, exitCode=exit_code, lastSeen=last_seen)
            if ending is Ending.VANISHED and not finished:
                self._record_failure(cause_of(ending), "the head was lost, or the driver with the supervisor", step)

    # One attempt

    def _submit(self, url: str) -> Attempt:
        """Start the next attempt."""
        if not self._head.is_alive():
            self._head.end()
            self._start_head()
            self._record(url)
        self._say_starting()
        started = time.monotonic()
        number = 1 + max((record["attempt"] for record in self._ledger.records("attempt-started")), default=0)
        attempt = Attempt(number, f"spotune-{number}-{time.time_ns():x}")
        self._directory.notice.unlink(missing_ok=True)
        self._ledger.append("attempt-started", attempt=number)
        metadata = {"spotune-directory": str(self._directory.root), "spotune-attempt": str(number)}
        entrypoint = f"exec {shlex.join(self._command(number))}"
        client = self._head.client()
        try:
            self._patiently(lambda: client.submit(entrypoint, attempt.submission_id, metadata))
        except JobsUnavailableError as error:  # an attempt that Ray does not know has vanished: `_watch` will see
            self._view.say(f"Ray did not take attempt {number}: {error}")
        self._startup["submit"] = time.monotonic() - started
        return attempt

    def _say_starting(self) -> None:
        """What a driver that is gone said last is true no more, and the next one is silent for a while."""
        status = files.read_json(self._directory.status)
        if status is not None:
            changes = {"phase": Phase.STARTING.value, "etaSeconds": None, "time": time.time()}
            files.write_json(self._directory.status, {**status, **changes}, durable=False)

    def _driver_command(self, number: int) -> list[str]:
        module = [sys.executable, "-m", "spotune_trainer.driver"]
        return [*module, "--directory", str(self._directory.root), "--attempt", str(number)]

    def _watch(self, attempt: Attempt) -> tuple[Ending, int | None]:
        """Follow an attempt to its end, and end it where it hangs or does not heed a stop; also its exit code."""
        self._heartbeat.restart(time.monotonic())
        watched = WatchedAttempt(self._head, attempt, self._timing)
        hung = False
        while True:
            self._look()
            self._heed_stop()
            if not hung and self._heartbeat.is_stale(time.monotonic()):
                hung = True
                age = self._heartbeat.age_seconds(time.monotonic())
                self._view.say(f"no sign of life for {age:.0f} s: ending the driver")
                watched.end()
            if self._stop_until is not None and time.time() > self._stop_until:
                watched.end()
            job = watched.look()
            ending = ending_of(job, hung=hung)
            if ending is not None:
                return ending, job.exit_code if job else None
            time.sleep(self._timing.poll)

    def _conclude(self, attempt: Attempt, ending: Ending, exit_code: int | None) -> SubmitAgain | Leave:
        """Record the end of an attempt, and decide what follows."""
        self._ledger.append("attempt-ended", attempt=attempt.number, exitCode=exit_code)
        stopping = self._is_stopping()
        if ending not in (Ending.DONE, Ending.FAILED, Ending.SUPERSEDED) and not stopping:
            failure = Failure(cause_of(ending), self._highest_step, time.time(), self._reason(attempt, ending))
            self._failures.append(failure)
            if ending is not Ending.INFRASTRUCTURE:  # the driver has recorded that itself
                self._record_failure(failure.cause, failure.message, failure.step)
        elif ending is not Ending.DONE and self._goes_with_head():
            words = "the head was told to go, and the workers to commit first"
            self._record_failure(FailureCause.HEAD_LOST, words, self._highest_step)
        return next_move(ending, self._failures, self._retry(), now=time.time(), stopping=stopping)

    def _record_failure(self, cause: FailureCause, message: str, step: int) -> None:
        generation = (files.read_json(self._directory.status) or {}).get("generation", 0)
        self._ledger.append("failure", generation=generation, cause=str(cause), message=message, step=step)

    def _goes_with_head(self) -> bool:
        """Whether it leaves because its pod goes, and not because somebody stopped the job."""
        return self._beside_head and self._orders.leaving and self._orders.stop_seconds is None

    def _reason(self, attempt: Attempt, ending: Ending) -> str:
        match ending:
            case Ending.HUNG:
                return f"no sign of life for {self._heartbeat.timeout_seconds:.0f} s"
            case Ending.CRASHED:
                return f"the driver crashed: {self._last_words(attempt)}"
            case Ending.VANISHED:
                return "the driver was killed, or its Ray died"
        return str(self._status.get("message") or "infrastructure")

    def _wait(self, move: SubmitAgain) -> None:
        """Wait before the next attempt."""
        if move.after_seconds > 0:
            self._view.say(f"trying again in {move.after_seconds:.0f} s")
        until = time.monotonic() + move.after_seconds
        while time.monotonic() < until:
            self._leave_if_asked()
            self._heartbeat.restart(time.monotonic())  # there is no driver to hear of
            time.sleep(min(self._timing.poll, max(0.0, until - time.monotonic())))

    def _raise_for(self, exit_code: int, attempt: Attempt) -> None:
        """The error of an exit code; none for a trained model."""
        if exit_code == 0:
            return
        kinds: dict[int, type[SpotuneError]] = {
            kind.exit_code: kind for kind in (JobError, InfrastructureError, SupersededError)
        }
        if self._is_stopping() and exit_code == InfrastructureError.exit_code:
            raise StoppedError(_STOPPED)
        raise kinds[exit_code](self._last_words(attempt))

    def _last_words(self, attempt: Attempt) -> str:
        """Why an attempt ended: what it said in its status, or else the end of its log."""
        if self._status.get("attempt") == attempt.number and self._status.get("message"):
            return str(self._status["message"])
        try:
            log = self._head.client().logs(attempt.submission_id) if self._head.is_alive() else ""
        except JobsUnavailableError:
            log = ""
        lines = [line for line in log.splitlines() if line.strip()][-_LAST_LINES:]
        return "\n".join(lines) or f"attempt {attempt.number} said nothing; see {self._directory.logs}"

    # What happens meanwhile

    def _look(self) -> None:
        """Take note of the driver's status and of new events, and show them."""
        self._heartbeat.timeout_seconds = self._hang_seconds()
        for event in self._events.read():
            if text := sentence(event):
                self._view.say(text)
        status = files.read_json(self._directory.status)
        if status is None:
            return
        self._status = status
        self._heartbeat.observe(status["heartbeat"], time.monotonic())
        self._highest_step = max(self._highest_step, status.get("step") or 0)
        self._view.show(status)
        if not self._said_startup and status["phase"] == "Training" and self._has_stepped():
            self._said_startup = True
            self._view.say(startup({**self._startup, **status.get("startup", {})}))

    def _has_stepped(self) -> bool:
        return (self._status.get("step") or 0) > (self._status.get("resumedFromStep") or 0)

    def _hang_seconds(self) -> float:
        """How long the heartbeat may stand still."""
        return self._retry().hang_timeout.seconds + self._timing.hang_margin

    def _patiently(self, call: Callable[[], _Answer]) -> _Answer:
        """Call again while a cold Ray does not answer yet."""
        until = time.monotonic() + self._timing.silence
        while True:
            try:
                return call()
            except JobsUnavailableError:
                if time.monotonic() > until or not self._head.is_alive():
                    raise
                self._heed_stop()
                time.sleep(self._timing.poll)

    # Stopping

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask to stop; a second one leaves at once."""
        before = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._orders.leaving:
            _ignore_signals()
            raise _LeaveNow
        self._orders.leave()

    def _is_stopping(self) -> bool:
        """Whether no further attempt is to start: once the workers were told, this one leaves, even if asked back."""
        return self._orders.stopping or self._draining or self._stop_until is not None

    def _heed_stop(self) -> None:
        """Pass a stop on to the workers, once."""
        if not self._is_stopping() or self._stop_until is not None:
            return
        seconds = self._orders.stop_seconds or self._timing.notice
        self._stop_until = time.time() + seconds
        reason = "the supervisor was told to stop"
        write_notice(self._directory.notice, seconds=seconds, stop=True, reason=reason)
        more = "; once more to leave at once" if self._orders.leaving else ""
        self._view.say(f"stopping: the workers commit and leave{more}")

    def _leave_if_asked(self) -> None:
        if self._is_stopping():
            raise StoppedError(_STOPPED)


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOPPED = "stopped as asked; the same command goes on from the last commit"


class _LeaveNow(BaseException):
    """A second signal: leave without waiting for anything."""


def _ignore_signals() -> None:
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
