"""State shared between the supervisor's main thread, its signal handlers and the threads of its HTTP server.

`ControlSignals` carries requests to the main thread, and `SupervisorStatus` carries its state to `/progress`. Every
field is replaced as a whole, so no lock is needed and a signal handler may do the same as an HTTP request.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from spotune_trainer.supervisor.preflight.result import PreflightReport


class SupervisorState(StrEnum):
    """What the supervisor of a pod is doing."""

    PREFLIGHT = "preflight"
    """Checking whether the job can run, before the first attempt."""
    RUNNING = "running"
    """An attempt runs, or is about to start."""
    WAITING = "waiting"
    """Waiting for something that is not the job's fault: storage, Ray, another supervisor."""
    STOPPING = "stopping"
    """A stop was requested; the workers commit and leave."""
    STOPPED = "stopped"
    """Nothing runs, and nothing starts before `POST /start`."""
    FAILED = "failed"
    """The job cannot be trained as it is; a changed job file is tried again."""
    TRAINED = "trained"
    """The model is trained; a job file with a longer training continues it."""


_NOTHING_RUNS = frozenset({SupervisorState.STOPPED, SupervisorState.FAILED, SupervisorState.TRAINED})


class ControlSignals:
    """Requests to a supervisor: train, suspend until resumed, or terminate."""

    def __init__(self) -> None:
        self._terminating = False
        self._grace_seconds: float | None = None

    def terminate(self) -> None:
        """Let the workers commit, then end the supervisor; safe in a signal handler."""
        self._terminating = True

    def suspend(self, grace_seconds: float) -> None:
        """Let the workers commit within `grace_seconds`, and start no attempt before `resume`."""
        self._grace_seconds = grace_seconds

    def resume(self) -> None:
        """Undo `suspend`."""
        self._grace_seconds = None

    @property
    def terminating(self) -> bool:
        """Whether the supervisor is to end."""
        return self._terminating

    @property
    def stopping(self) -> bool:
        """Whether no attempt may run, because of `suspend` or `terminate`."""
        return self._terminating or self._grace_seconds is not None

    @property
    def grace_seconds(self) -> float | None:
        """Time that `suspend` gives the workers to commit; None while not suspended."""
        return self._grace_seconds


class SupervisorStatus:
    """The supervisor's own part of `/progress`.

    Attributes:
        job: SHA-256 of the bytes of the job file in use, in hex; empty before the file was read.
        job_file_problem: why a newer job file is not in use; empty if there is none.
        preflight: results of the preflight.
        is_run_stopping: whether the workers have been told to leave. They do, even if the job is resumed meanwhile.
    """

    def __init__(self, control: ControlSignals) -> None:
        self._control = control
        self._state = (SupervisorState.WAITING, "")
        self.job = ""
        self.job_file_problem = ""
        self.preflight = PreflightReport()
        self.is_run_stopping: Callable[[], bool] = lambda: False

    def set(self, state: SupervisorState, message: str = "") -> None:
        """Enter a state, with the reason where people need one."""
        self._state = state, message

    def as_json(self) -> dict[str, Any]:
        """The object `supervisor` of `/progress`."""
        state, message = self._state
        if (self._control.stopping or self.is_run_stopping()) and state not in _NOTHING_RUNS:
            state = SupervisorState.STOPPING
        elif not self._control.stopping and state is SupervisorState.STOPPED:
            state = SupervisorState.WAITING  # resumed, and the main thread reacts within its next poll
        return {
            "job": self.job,
            "state": state.value,
            "message": message or self.job_file_problem,
            "preflight": self.preflight.as_json(),
        }
