"""Stopping a supervisor: SIGTERM and SIGINT as requests to terminate, and the notice by which the workers commit."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from spotune.errors import StoppedError
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.supervisor.console import View
from spotune_trainer.supervisor.control import ControlSignals

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LeaveAtOnceError(BaseException):
    """A second signal came: leave without waiting for the workers."""


@contextmanager
def terminate_on_signal(control: ControlSignals) -> Iterator[None]:
    """Let SIGTERM and SIGINT request termination, however often they come.

    Without a handler the kernel would discard SIGTERM for PID 1 of a container.
    """
    with _handled_by(lambda *_: control.terminate()):
        yield


@contextmanager
def terminate_or_leave_on_signal(control: ControlSignals) -> Iterator[None]:
    """Let the first SIGTERM or SIGINT request termination, and the next one leave at once.

    Raises:
        LeaveAtOnceError: within the block, at the second signal.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        if control.terminating:
            ignore_signals()
            raise LeaveAtOnceError
        control.terminate()

    with _handled_by(handle):
        yield


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT from now on, so that they cannot interrupt the clean-up."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler, and restore the earlier ones after the block."""
    earlier = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, previous in earlier.items():
            signal.signal(number, previous)


class StopRequest:
    """Whether one run of a supervisor has to stop, and the notice by which the workers commit first.

    Once the workers have the notice, this run ends, even if the job is resumed meanwhile.

    Args:
        directory: of the job.
        control: requests to the supervisor.
        view: shows the run.
        notice_seconds: given to the workers where `suspend` gives no other time.
        beside_head: whether the supervisor runs in the head's pod.
    """

    def __init__(
        self, directory: JobDirectory, control: ControlSignals, view: View, notice_seconds: float, *, beside_head: bool
    ) -> None:
        self._directory = directory
        self._control = control
        self._view = view
        self._notice_seconds = notice_seconds
        self._beside_head = beside_head
        self._draining = False
        self._deadline: float | None = None

    @property
    def is_pending(self) -> bool:
        """Whether no further attempt may start."""
        return self._control.stopping or self._draining or self._deadline is not None

    @property
    def is_overdue(self) -> bool:
        """Whether the workers have used up the time of the notice."""
        return self._deadline is not None and time.monotonic() > self._deadline

    @property
    def loses_head(self) -> bool:
        """Whether the supervisor stops because its pod ends, and not because a user stopped the job."""
        return self._beside_head and self._control.terminating and self._control.grace_seconds is None

    def drain(self) -> None:
        """Stop the attempt that still runs, and start no other one."""
        self._draining = True

    def notify_workers(self) -> None:
        """If a stop is pending, write the notice to the workers, once.

        If only the head ends, they commit and train on. The next head's driver adopts them.
        """
        if not self.is_pending or self._deadline is not None:
            return
        seconds = self._control.grace_seconds or self._notice_seconds
        self._deadline = time.monotonic() + seconds
        if self.loses_head:
            write_notice(self._directory.notice, seconds=seconds, reason="the head is about to end")
            self._view.log("the head ends: the workers commit and train on")
            return
        write_notice(self._directory.notice, seconds=seconds, stop=True, reason="the supervisor was asked to stop")
        hint = "; send the signal again to leave at once" if self._control.terminating else ""
        self._view.log(f"stopping: the workers commit and leave{hint}")

    def raise_if_pending(self) -> None:
        """Raise StoppedError if no further attempt may start."""
        if self.is_pending:
            raise StoppedError("stopped on request; the same command continues from the last commit")
