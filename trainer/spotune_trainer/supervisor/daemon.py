"""The resident supervisor of a pod: it runs until SIGTERM, also after its job has failed or is trained.

`spotune run` ends when an attempt cannot continue, because a person sees it and starts it again. A pod has no such
person, so the daemon reacts to each result:

    result of a run                      what the daemon does next
    trained, or the job's own error      shows the result at `/progress` until the job file changes
    stopped                              waits for `POST /start`
    superseded by another supervisor     waits until the heartbeat of that one is stale
    infrastructure, unusable volume      runs again after some seconds
"""

from __future__ import annotations

import time
from collections.abc import Callable

from spotune.errors import InfrastructureError, JobError, StoppedError, SupersededError, UsageError
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.status import Phase, publish_phase
from spotune_trainer.supervisor.control import ControlSignals, SupervisorState, SupervisorStatus
from spotune_trainer.supervisor.signals import terminate_on_signal

TAKEOVER_SECONDS = 180.0
"""This supervisor takes over from another one whose heartbeat has not changed for so long."""
RETRY_SECONDS = 10.0
_POLL_SECONDS = 0.5


class SupervisorDaemon:
    """Runs a job's supervisor again and again, and waits in between.

    Args:
        directory: of the job.
        run: runs a supervisor until the model is trained, with the errors of `Supervisor.run`.
        control: requests to the supervisor; SIGTERM and SIGINT request termination.
        status: set to what the daemon is doing.
        file_changed: whether the job file has changed since `run` read it.
        log: writes a line for people.
        sleep: waits for some seconds.
        other_heartbeat: returns what changes while another supervisor of the job lives; None: read the directory, which
            both of them have.
    """

    def __init__(
        self,
        directory: JobDirectory,
        run: Callable[[], None],
        control: ControlSignals,
        status: SupervisorStatus,
        file_changed: Callable[[], bool],
        log: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        other_heartbeat: Callable[[], object] | None = None,
    ) -> None:
        self._directory = directory
        self._run = run
        self._control = control
        self._status = status
        self._file_changed = file_changed
        self._log = log
        self._sleep = sleep
        self._has_own_status = other_heartbeat is not None
        self._heartbeat = other_heartbeat or self._heartbeat_in_directory

    def run_until_terminated(self) -> None:
        """Train, then keep the result readable, until SIGTERM or SIGINT.

        Raises:
            JobError: the job cannot be trained as it is. Raised at termination; until then `/progress` shows it.
        """
        outcome: JobError | None = None
        with terminate_on_signal(self._control):
            while not self._control.terminating:
                try:
                    outcome = self._train()
                except OSError as error:  # an unmounted or full volume can recover
                    self._retry_later(error)
        if outcome is not None:
            raise outcome

    def _train(self) -> JobError | None:
        """Run a supervisor once, then wait for a reason to run again; returns the error of a job that has failed."""
        try:
            self._run()
        except StoppedError:
            self._wait_while_stopped()
        except JobError as error:
            self._show_failure(error)
            return error
        except SupersededError as error:
            if self._has_own_status:
                publish_phase(self._directory, Phase.STARTING, str(error))
            message = f"{error}: waiting until it has been silent for {TAKEOVER_SECONDS:.0f} s"
            self._wait(message, TAKEOVER_SECONDS, restart_on_heartbeat=True)
        except (InfrastructureError, UsageError) as error:
            if isinstance(error, InfrastructureError) and self._control.stopping:
                self._wait_while_stopped()
            else:
                self._retry_later(error)
        else:
            self._log("trained; waiting for the pod to be deleted")
            self._status.set(SupervisorState.TRAINED)
            self._wait_for_changed_file()
        return None

    def _wait_while_stopped(self) -> None:
        """Wait for `resume`, or for a changed job file, which the next run reads without starting an attempt."""
        self._log("stopped")
        self._status.set(SupervisorState.STOPPED)
        while self._control.stopping and not (self._control.terminating or self._file_changed()):
            self._sleep(_POLL_SECONDS)

    def _show_failure(self, error: JobError) -> None:
        """Show at `/progress` why the job cannot be trained, until its file changes."""
        self._log(str(error))
        publish_phase(self._directory, Phase.FAILED, str(error))
        self._status.set(SupervisorState.FAILED, str(error))
        self._wait_for_changed_file()

    def _wait_for_changed_file(self) -> None:
        while not self._control.terminating:
            if self._file_changed():
                self._log("the job file has changed")
                return
            self._sleep(_POLL_SECONDS)

    def _retry_later(self, error: Exception) -> None:
        self._wait(f"{error}; retrying in {RETRY_SECONDS:.0f} s", RETRY_SECONDS)

    def _wait(self, message: str, seconds: float, *, restart_on_heartbeat: bool = False) -> None:
        """Wait for some seconds, or until a request comes; `restart_on_heartbeat` restarts the wait at each beat."""
        self._log(message)
        self._status.set(SupervisorState.WAITING, message)
        stopping, waited = self._control.stopping, 0.0
        heartbeat = self._heartbeat() if restart_on_heartbeat else None
        while waited < seconds and self._control.stopping == stopping and not self._control.terminating:
            self._sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
            if restart_on_heartbeat and heartbeat != (heartbeat := self._heartbeat()):
                waited = 0.0

    def _heartbeat_in_directory(self) -> object:
        return (files.read_json(self._directory.status) or {}).get("heartbeat")
