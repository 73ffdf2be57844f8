"""What a supervisor is told, by signals and over HTTP, and what it says of itself.

Its main thread acts; the threads of the HTTP server leave word here and read. Every field is replaced as a whole, so no
lock is needed, and a signal handler can do what a request does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal


class State(StrEnum):
    """What a supervisor that stays is doing."""

    PREFLIGHT = "preflight"
    """Looking whether the job can be run, before the first attempt."""
    RUNNING = "running"
    """An attempt runs, or is about to."""
    WAITING = "waiting"
    """Waiting for what is not the job's fault: storage, Ray, another supervisor."""
    STOPPING = "stopping"
    """Told to stop; the workers commit and leave."""
    STOPPED = "stopped"
    """Nothing runs, and nothing will before it is told to start."""
    FAILED = "failed"
    """The job cannot be trained as it is; a changed job file is tried again."""
    TRAINED = "trained"
    """The model is trained; a job file that asks for longer training goes on."""


_NOTHING_RUNS = frozenset({State.STOPPED, State.FAILED, State.TRAINED})


class Orders:
    """What a supervisor is to do: train, stop until it is told to start, or leave for good."""

    def __init__(self) -> None:
        self._leaving = False
        self._stop_seconds: float | None = None

    def leave(self) -> None:
        """Let the workers commit, and end; safe in a signal handler."""
        self._leaving = True

    def stop(self, seconds: float) -> None:
        """Let the workers commit within `seconds`, and start no attempt before `start`."""
        self._stop_seconds = seconds

    def start(self) -> None:
        """Undo `stop`."""
        self._stop_seconds = None

    @property
    def leaving(self) -> bool:
        """Whether it is to end."""
        return self._leaving

    @property
    def stopping(self) -> bool:
        """Whether no attempt is to run, for now or for good."""
        return self._leaving or self._stop_seconds is not None

    @property
    def stop_seconds(self) -> float | None:
        """What `stop` gave the workers; None where nobody asked for it."""
        return self._stop_seconds


@dataclass(frozen=True)
class CheckResult:
    """How one look of the preflight went.

    Attributes:
        name: of the check.
        status: running, passed or failed.
        message: a sentence with figures, and with the remedy where it failed; of the look before while it runs.
        seconds: that it took.
    """

    name: str
    status: Literal["running", "passed", "failed"]
    message: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class Standing:
    """What a supervisor says of itself at `/progress`.

    Attributes:
        job: SHA-256 of the job file's bytes that it works by, in hex; empty before it has read one.
        remark: why a newer job file is not worked by; empty where there is none.
        checks: of the preflight, in order; empty before it has begun.
        passed: whether the preflight is over.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._said = (State.WAITING, "")
        self.job = ""
        self.remark = ""
        self.checks: tuple[CheckResult, ...] = ()
        self.passed = False

    def say(self, state: State, message: str = "") -> None:
        """Be in a state, and why where that is worth a sentence."""
        self._said = state, message

    def as_json(self) -> dict[str, Any]:
        """The object `supervisor` of `/progress`."""
        state, message = self._said
        if self._orders.stopping and state not in _NOTHING_RUNS:
            state = State.STOPPING
        elif not self._orders.stopping and state is State.STOPPED:
            state = State.WAITING  # its main thread is about to see that it was told to start
        return {
            "job": self.job,
            "state": state.value,
            "message": message or self.remark,
            "preflight": {"passed": self.passed, "checks": [check.as_json() for check in self.checks]},
        }
