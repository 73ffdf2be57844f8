"""SIGTERM and SIGINT as requests to terminate, and the notice by which the workers commit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from spotune.errors import StoppedError
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.console import PlainView
from spotune_trainer.supervisor.control import ControlSignals
from spotune_trainer.supervisor.signals import (
    LeaveAtOnceError,
    StopRequest,
    terminate_on_signal,
    terminate_or_leave_on_signal,
)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


class Stopping:
    """A stop request with recorded lines."""

    def __init__(self, root: Path, *, beside_head: bool = False) -> None:
        self.directory = JobDirectory(root)
        self.control = ControlSignals()
        self.lines: list[str] = []
        view = PlainView(self.lines.append)
        self.request = StopRequest(self.directory, self.control, view, notice_seconds=60.0, beside_head=beside_head)

    def notice_seconds(self) -> float:
        notice = files.read_json(self.directory.notice)
        assert notice is not None
        assert notice["stop"]
        return float(notice["deadline"] - notice["time"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_requests_termination_and_the_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    control = ControlSignals()
    with terminate_on_signal(control):
        for _ in range(2):
            send(number)
        assert control.terminating
    assert signal.getsignal(number) == before


def test_second_signal_leaves_at_once_and_further_ones_are_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    control = ControlSignals()
    with terminate_or_leave_on_signal(control):
        send(signal.SIGTERM)
        assert control.terminating
        with pytest.raises(LeaveAtOnceError):
            send(signal.SIGINT)
        send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_a_stop_nothing_is_written(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path)
    stopping.request.notify_workers()
    stopping.request.raise_if_pending()
    assert not stopping.directory.notice.exists()
    assert (stopping.request.is_pending, stopping.request.is_overdue) == (False, False)


def test_workers_get_one_notice_and_the_run_ends_even_after_a_resume(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path)
    stopping.control.suspend(30)
    stopping.request.notify_workers()
    assert stopping.notice_seconds() == pytest.approx(30)
    stopping.directory.notice.unlink()
    stopping.control.resume()
    stopping.request.notify_workers()
    assert not stopping.directory.notice.exists()
    assert stopping.lines == ["stopping: the workers commit and leave"]
    with pytest.raises(StoppedError, match="continues from the last commit"):
        stopping.request.raise_if_pending()


def test_drain_and_termination_give_the_default_notice(tmp_path: Path) -> None:
    for folder in ("drained", "terminated"):
        (tmp_path / folder).mkdir()
    drained, terminated = Stopping(tmp_path / "drained"), Stopping(tmp_path / "terminated")
    drained.request.drain()
    terminated.control.terminate()
    for stopping in (drained, terminated):
        stopping.request.notify_workers()
        assert stopping.notice_seconds() == pytest.approx(60)
    assert terminated.lines[0].endswith("; send the signal again to leave at once")


@pytest.mark.parametrize("beside_head", [True, False])
def test_only_termination_beside_the_head_loses_the_head(tmp_path: Path, beside_head: bool) -> None:
    stopping = Stopping(tmp_path, beside_head=beside_head)
    assert not stopping.request.loses_head
    stopping.control.terminate()
    assert stopping.request.loses_head == beside_head
    stopping.control.suspend(30)
    assert not stopping.request.loses_head, "a user has stopped the job before"


def test_notice_that_has_run_out_is_overdue(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path)
    stopping.control.suspend(-1.0)
    stopping.request.notify_workers()
    assert stopping.request.is_overdue
