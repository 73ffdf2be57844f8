"""Ranks wait for the processes of the last generation, which are dead but may not have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from spotune.errors import InfrastructureError
from spotune_trainer.engine.predecessors import Predecessors
from spotune_trainer.engine.process_state import has_ended, status_of_dead

MEMORY_BYTES = 2_000_000_000
"""So much that the kernel needs a while to free it."""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    code = f"memory = b'1' * {MEMORY_BYTES}; print('ready', flush=True); import time; time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def wait_until_dead(process: subprocess.Popen[str]) -> int:
    until = time.monotonic() + 30
    while (status := status_of_dead(process.pid)) is None:
        assert time.monotonic() < until
    return status


def test_a_killed_process_is_dead_before_it_has_ended(process: subprocess.Popen[str]) -> None:
    assert status_of_dead(process.pid) is None
    assert not has_ended(process.pid)

    process.kill()
    status = wait_until_dead(process)

    assert status == -signal.SIGKILL
    assert not has_ended(process.pid)
    Predecessors([process.pid]).wait()
    assert has_ended(process.pid)
    assert process.wait() == status
    assert has_ended(process.pid)  # and is known to its parent


def test_an_exit_status_is_known_before_the_parent_knows_it() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    Predecessors([pid]).wait()
    assert status_of_dead(pid) == 3
    os.waitpid(pid, 0)
    assert status_of_dead(pid) is None


def test_a_process_that_does_not_end_is_an_error(process: subprocess.Popen[str]) -> None:
    with pytest.raises(InfrastructureError, match=f"process {process.pid} of the last worker group"):
        Predecessors([process.pid], longest_seconds=0.1).wait()


def test_a_rank_without_a_gpu_waits_before_it_has_a_model(process: subprocess.Popen[str]) -> None:
    process.kill()
    wait_until_dead(process)
    Predecessors([process.pid]).wait_for_room()
    assert has_ended(process.pid)


def test_nothing_is_waited_for_without_predecessors() -> None:
    Predecessors(longest_seconds=0).wait()
    Predecessors(longest_seconds=0).wait_for_room()
