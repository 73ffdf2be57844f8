"""Finds and kills the processes of a family, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune_trainer.supervisor.ray_head.processes import Process, ProcessFamily, boot_id, command_line, find_process
from tests.trainer.support.waiting import wait_until

MARKER = "SPOTUNE_TEST_FAMILY=of-this-test"
_PARENT = """
import os, subprocess, sys, time
script = "import time; time.sleep(100)"
subprocess.Popen([sys.executable, "-c", script])
subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
subprocess.Popen([sys.executable, "-c", script], env={})
open(sys.argv[1], "w").close()
time.sleep(100)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A session leader with the marker and three children: plain, in its own session, and without the marker."""
    name, value = MARKER.split("=")
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(ready)], env={**os.environ, name: value}, start_new_session=True
    )
    assert wait_until(ready.exists, 60)
    yield process
    family_of(process).kill()
    process.wait()


def family_of(process: subprocess.Popen[bytes], marker: str = MARKER) -> ProcessFamily:
    return ProcessFamily(find_process(process.pid), boot_id(), marker)


def test_family_is_the_session_and_all_processes_with_the_marker(parent: subprocess.Popen[bytes]) -> None:
    assert len(family_of(parent).members()) == 4


def test_family_is_found_by_its_marker_alone(parent: subprocess.Popen[bytes]) -> None:
    assert len(ProcessFamily(None, boot_id(), MARKER).members()) == 3


def test_family_is_killed_after_its_leader_has_ended(parent: subprocess.Popen[bytes]) -> None:
    family = family_of(parent)
    members = family.members()
    parent.kill()
    parent.wait()
    family.kill()
    assert not any(member.is_alive() for member in members)


def test_session_of_another_process_with_the_leaders_pid_is_no_member(parent: subprocess.Popen[bytes]) -> None:
    now = find_process(parent.pid)
    assert now is not None
    earlier = Process(now.pid, now.started - 1)
    assert ProcessFamily(earlier, boot_id(), "SPOTUNE_TEST_FAMILY=other").members() == []


def test_session_zero_is_no_family() -> None:
    assert ProcessFamily(Process(0, 0), boot_id(), "SPOTUNE_TEST_FAMILY=nobody").members() == []


def test_own_session_is_never_a_member() -> None:
    leader = find_process(os.getsid(0)) or Process(os.getsid(0), 0)
    assert ProcessFamily(leader, boot_id(), "SPOTUNE_TEST_FAMILY=nobody").members() == []


def test_family_of_an_earlier_boot_has_no_members(parent: subprocess.Popen[bytes]) -> None:
    assert ProcessFamily(find_process(parent.pid), "another-boot", MARKER).members() == []


def test_zombie_is_not_alive(parent: subprocess.Popen[bytes]) -> None:
    process = find_process(parent.pid)
    assert process is not None
    assert "time.sleep" in command_line(process)
    parent.kill()
    assert wait_until(lambda: not process.is_alive(), 60)
    assert command_line(Process(2**22 + 1, 0)) == ""
