"""The driver that waits for its Ray job: both are real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotune_trainer.driver.early_start import _hand_over
from spotune_trainer.job_directory.process_marker import EARLY_DRIVER_SOCKET

JOB = """
import sys
from spotune_trainer.driver.early_start import run_in_early_driver
ended = run_in_early_driver(sys.argv[1:])
if ended is None:
    print("no early driver")
sys.exit(99 if ended is None else ended)
"""
WAITING = """
import os, pathlib, signal, sys, time
from spotune_trainer.driver.early_start import wait_for_job
def prepare():
    {prepare}
def run(arguments):
    {run}
wait_for_job(pathlib.Path(sys.argv[1]), prepare, run)
"""
SLEEP = "print(os.getpid(), flush=True); time.sleep(60)"


class Processes:
    """Starts early drivers and Ray jobs, and ends them with the test."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "driver.sock"
        self._all: list[subprocess.Popen[str]] = []

    def early_driver(self, run: str, prepare: str = "pass") -> subprocess.Popen[str]:
        """An early driver that listens."""
        process = self._start(WAITING.format(run=run, prepare=prepare), str(self.socket))
        wait_until(self.socket.exists)
        return process

    def job(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """A Ray job that looks for an early driver."""
        return self._start(JOB, *arguments, **{EARLY_DRIVER_SOCKET: str(self.socket), **environment})

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._all:
            process.kill()
            process.communicate()

    def _start(self, code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._all.append(process)
        return process


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """See `Processes`."""
    started = Processes(tmp_path)
    yield started
    started.end()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_early_driver_runs_as_the_job(processes: Processes, tmp_path: Path) -> None:
    """It has the arguments, the environment, the folder and the output of the job, and gives it its exit code."""
    early = processes.early_driver("print(arguments, os.environ['OF_THE_JOB'], flush=True); return 20")
    job = processes.job("--attempt", "3", OF_THE_JOB="yes")
    output, errors = job.communicate(timeout=60)
    assert (output, errors) == ("['--attempt', '3'] yes\n", "")
    assert job.returncode == 20
    assert early.wait(60) in (20, -signal.SIGKILL)
    assert not processes.socket.exists()


def test_without_an_early_driver_the_job_runs_itself(processes: Processes) -> None:
    assert processes.job().communicate(timeout=60)[0] == "no early driver\n"
    processes.socket.touch()  # as after one that was killed
    assert processes.job().communicate(timeout=60)[0] == "no early driver\n"


def test_an_early_driver_serves_one_job(processes: Processes) -> None:
    processes.early_driver("return 0")
    assert processes.job().wait(60) == 0
    assert processes.job().wait(60) == 99


def test_a_job_that_comes_during_the_imports_waits(processes: Processes, tmp_path: Path) -> None:
    processes.early_driver("return 20", prepare=f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)")
    job = processes.job()
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.5)
    (tmp_path / "go").touch()
    assert job.wait(60) == 20


def test_an_early_driver_that_dies_during_its_imports_is_not_needed(processes: Processes) -> None:
    early = processes.early_driver("return 20", prepare="time.sleep(60)")
    job = processes.job()
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.5)
    early.kill()
    assert job.communicate(timeout=60)[0] == "no early driver\n"


def test_an_exception_is_shown_as_that_of_the_job(processes: Processes) -> None:
    processes.early_driver("raise ValueError('broken')")
    job = processes.job()
    assert job.communicate(timeout=60)[1].endswith("ValueError: broken\n")
    assert job.returncode == 1


def test_a_job_whose_driver_is_killed_ends_as_if_it_had_been_killed(processes: Processes) -> None:
    early = processes.early_driver(SLEEP)
    job = processes.job()
    assert job.stdout is not None
    assert int(job.stdout.readline()) == early.pid
    early.kill()
    assert job.wait(60) == -signal.SIGKILL


def test_a_driver_ends_with_its_job(processes: Processes) -> None:
    early = processes.early_driver(SLEEP)
    job = processes.job()
    assert job.stdout is not None
    job.stdout.readline()
    job.kill()
    assert early.wait(60) == -signal.SIGKILL


def test_a_driver_ends_with_a_job_that_has_not_read_its_answer(processes: Processes) -> None:
    """Then the connection is not closed but reset."""
    early = processes.early_driver(SLEEP)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as job:
        job.connect(str(processes.socket))
        _hand_over(job, [])
        assert job.recv(1, socket.MSG_PEEK)
    assert early.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("ignored", [False, True], ids=["noticed", "ignored"])
def test_a_driver_is_terminated_with_its_job(processes: Processes, *, ignored: bool) -> None:
    """Also one that does not end at SIGTERM."""
    early = processes.early_driver(f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}" if ignored else SLEEP)
    job = processes.job()
    assert job.stdout is not None
    job.stdout.readline()
    job.terminate()
    assert early.wait(60) == -(signal.SIGKILL if ignored else signal.SIGTERM)
    assert job.wait(60) == -signal.SIGKILL
