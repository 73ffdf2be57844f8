"""Finding and ending our own processes, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune_trainer.supervisor.ray_head.processes import Family, Process, boot_id, command_line, find_process
from tests.trainer.support.waiting import wait_until

MARK = "SPOTUNE_TEST_FAMILY=of-this-test"
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
    """A session leader with the mark and three children: one plain, one in a session of its own, one without mark."""
    name, value = MARK.split("=")
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(ready)], env={**os.environ, name: value}, start_new_session=True
    )
    assert wait_until(ready.exists, 20)
    yield process
    family_of(process).end()
    process.wait()


def family_of(process: subprocess.Popen[bytes], mark: str = MARK) -> Family:
    return Family(find_process(process.pid), boot_id(), mark)


def test_family_is_the_session_and_all_that_bear_the_mark(parent: subprocess.Popen[bytes]) -> None:
    assert len(family_of(parent).members()) == 4


def test_family_is_known_by_its_mark_alone(parent: subprocess.Popen[bytes]) -> None:
    assert len(Family(None, boot_id(), MARK).members()) == 3


def test_family_is_ended_with_its_leader_gone(parent: subprocess.Popen[bytes]) -> None:
    family = family_of(parent)
    members = family.members()
    parent.kill()
    parent.wait()
    family.end()
    assert not any(member.is_alive() for member in members)


def test_session_whose_leader_is_another_process_now_is_not_ours(parent: subprocess.Popen[bytes]) -> None:
    now = find_process(parent.pid)
    assert now is not None
    earlier = Process(now.pid, now.started - 1)
    assert Family(earlier, boot_id(), "SPOTUNE_TEST_FAMILY=other").members() == []


def test_session_zero_belongs_to_strangers() -> None:
    assert Family(Process(0, 0), boot_id(), "SPOTUNE_TEST_FAMILY=nobody").members() == []


def test_own_session_is_never_ended() -> None:
    leader = find_process(os.getsid(0)) or Process(os.getsid(0), 0)
    assert Family(leader, boot_id(), "SPOTUNE_TEST_FAMILY=nobody").members() == []


def test_nothing_of_an_earlier_boot_runs(parent: subprocess.Popen[bytes]) -> None:
    assert Family(find_process(parent.pid), "another-boot", MARK).members() == []


def test_zombie_is_not_alive(parent: subprocess.Popen[bytes]) -> None:
    process = find_process(parent.pid)
    assert process is not None
    assert "time.sleep" in command_line(process)
    parent.kill()
    assert wait_until(lambda: not process.is_alive(), 20)
    assert command_line(Process(2**22 + 1, 0)) == ""
