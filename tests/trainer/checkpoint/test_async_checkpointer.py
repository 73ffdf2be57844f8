"""Commits beside training: what was copied is what is saved, one at a time, and a volume that fails is outlasted."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from spotune.errors import SupersededError
from spotune.job import CheckpointSpec
from spotune_trainer.checkpoint import async_checkpointer as committer_module
from spotune_trainer.checkpoint import writer
from spotune_trainer.checkpoint.async_checkpointer import Committed, Committer
from spotune_trainer.checkpoint.fragment import Fragment, HeldFragment
from spotune_trainer.checkpoint.generations import choose_checkpoint, claim
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, open_checkpoint, rank_ok
from spotune_trainer.checkpoint.reader import read_parameters, verify
from spotune_trainer.checkpoint.snapshot import Snapshot
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.checkpoints import State, cut, make_manifest, make_state
from tests.trainer.support.waiting import wait_until

FIRST, SECOND = CheckpointName(5, 1), CheckpointName(10, 1)


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    found = JobDirectory(tmp_path)
    claim(found, None)
    return found


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_module, "_FIRST_RETRY_SECONDS", 0.01)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before it is open."""
    opened = threading.Event()

    def late(*arguments: object) -> None:
        assert opened.wait(30)
        writer.write_fragments(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(committer_module, "write_fragments", late)
    yield opened
    opened.set()


def make(directory: JobDirectory, rank: int = 0, world_size: int = 1, keep: int = 2) -> Committer:
    return Committer(directory, rank, world_size, CheckpointSpec(keep=keep))


def begin(committer: Committer, name: CheckpointName, state: State, rank: int = 0, world_size: int = 1) -> None:
    committer.begin(name, cut(state, world_size, rank), lambda entries: make_manifest(name, entries))


def whole(directory: JobDirectory, name: CheckpointName) -> Checkpoint:
    found = open_checkpoint(directory.checkpoints / str(name))
    assert isinstance(found, Checkpoint)
    verify(found)
    return found


def saved(directory: JobDirectory, name: CheckpointName) -> torch.Tensor:
    return read_parameters(whole(directory, name))["layer.weight"].flatten()


def test_what_is_saved_is_the_state_when_the_commit_began(directory: JobDirectory, gate: threading.Event) -> None:
    committer, state = make(directory), make_state()
    before = state["layer.weight/fp32"].clone()
    begin(committer, FIRST, state)
    state["layer.weight/fp32"].fill_(7.0)  # the next step
    assert committer.is_busy
    assert committer.poll() is None
    gate.set()
    ended = committer.wait()
    assert ended is not None
    assert ended.manifest is not None
    assert ended.manifest.step == 5
    assert ended.stall_seconds < ended.seconds
    assert torch.equal(saved(directory, FIRST), before)
    assert not committer.is_busy
    assert committer.wait() is None


def test_a_second_commit_while_one_is_in_flight_is_a_mistake(directory: JobDirectory, gate: threading.Event) -> None:
    committer = make(directory)
    begin(committer, FIRST, make_state())
    with pytest.raises(AssertionError, match="one commit at a time"):
        begin(committer, SECOND, make_state())
    gate.set()
    committer.wait()


def test_rank_0_ends_a_commit_once_all_ranks_have_written(directory: JobDirectory) -> None:
    state = make_state()
    first, second = make(directory, 0, 2), make(directory, 1, 2)
    begin(first, FIRST, state, 0, 2)
    time.sleep(0.2)
    assert first.is_busy
    begin(second, FIRST, state, 1, 2)
    other, ended = second.wait(), first.wait()
    assert isinstance(other, Committed)
    assert isinstance(ended, Committed)
    assert other.manifest is None
    assert ended.manifest is not None
    assert torch.equal(saved(directory, FIRST), state["layer.weight/fp32"])


def test_what_is_superseded_is_pruned_behind_the_training(directory: JobDirectory) -> None:
    committer = make(directory, keep=1)
    for name in (FIRST, SECOND):
        begin(committer, name, make_state(name.step))
        committer.wait()
    assert [path.name for path in directory.checkpoints.iterdir()] == [str(SECOND)]


def test_a_volume_that_fails_is_tried_again_and_the_last_commit_stays(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer, state = make(directory), make_state(5)
    begin(committer, FIRST, state)
    committer.wait()
    is_full = threading.Event()
    is_full.set()
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if is_full.is_set() and len(data) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    begin(committer, SECOND, make_state(10))
    assert wait_until(lambda: committer.problem is not None, timeout_seconds=10)
    assert committer.problem == ("the commit of step 10 fails, and is tried again: [Errno 28] No space left on device")
    assert committer.is_busy
    assert choose_checkpoint(directory).checkpoint == whole(directory, FIRST)
    assert list((directory.checkpoints / str(SECOND)).iterdir()) == [], "a part of a file keeps others from the space"
    is_full.clear()
    ended = committer.wait()
    assert ended is not None
    assert committer.problem is None
    assert choose_checkpoint(directory).checkpoint == whole(directory, SECOND)


def test_a_commit_that_takes_long_is_said_to(directory: JobDirectory, gate: threading.Event) -> None:
    now = [1000.0]
    committer = Committer(directory, 0, 1, CheckpointSpec(), clock=lambda: now[0])
    begin(committer, FIRST, make_state())
    now[0] += 119
    assert committer.problem is None
    now[0] += 61
    assert committer.problem == "the commit of step 5 has been under way for 3 min"
    gate.set()
    committer.wait()


def test_a_commit_advances_while_any_rank_writes_or_is_refused(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, state = [1000.0], make_state()
    first = Committer(directory, 0, 2, CheckpointSpec(), clock=lambda: now[0])
    second = Committer(directory, 1, 2, CheckpointSpec(), clock=lambda: now[0])

    def advances(committer: Committer) -> bool:
        now[0] += 1
        return committer.advances()

    assert not advances(first)
    begin(first, FIRST, state, 0, 2)
    assert wait_until(lambda: (directory.checkpoints / str(FIRST) / rank_ok(0)).exists(), timeout_seconds=10)
    assert advances(first)
    assert not advances(first), "it waits for the other rank, of which nothing has come"
    real = os.write

    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", refuse)
    begin(second, FIRST, state, 1, 2)
    for _ in range(3):
        assert wait_until(lambda: advances(second), timeout_seconds=10), "each refusal is an answer"
    assert wait_until(lambda: advances(first), timeout_seconds=10)
    monkeypatch.setattr(os, "write", real)
    second.wait()
    assert not second.advances()
    assert first.wait() is not None


def test_a_generation_that_was_superseded_commits_nothing(directory: JobDirectory, gate: threading.Event) -> None:
    committer = make(directory)
    begin(committer, FIRST, make_state())
    claim(directory, None)
    gate.set()
    with pytest.raises(SupersededError, match="generation 1 was superseded"):
        committer.wait()
    assert choose_checkpoint(directory).checkpoint is None


def test_who_waits_is_called_meanwhile(directory: JobDirectory, gate: threading.Event) -> None:
    committer = make(directory)
    begin(committer, FIRST, make_state())
    assert committer.wait(gate.set) is not None


def test_memory_is_taken_once() -> None:
    snapshot, state = Snapshot(), make_state()
    snapshot.reserve(cut(state, 1, 0))
    addresses = set()
    for _ in range(3):
        before = state["layer.weight/exp_avg"].clone()
        snapshot.take(cut(state, 1, 0))
        snapshot.protect()
        for tensor in state.values():
            tensor.add_(1.0)
        copy = snapshot.fragments()[0]
        addresses.add(copy.states["fp32"].data_ptr())
        assert torch.equal(copy.states["exp_avg"], before)
    assert len(addresses) == 1


class FailingSnapshot(Snapshot):
    """As on a GPU without room for a copy within it, whose copies to the host fail."""

    def take(self, fragments: Sequence[HeldFragment]) -> None:
        super().take(fragments)
        self._read.clear()
        self._sources = [state for fragment in fragments for state in fragment.states.values()]
        self._are_originals = True

    def fragments(self) -> list[Fragment]:
        self._copy_to_host = self._fail  # type: ignore[method-assign]
        return super().fragments()

    def _fail(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_copy_that_fails_ends_its_commit_and_keeps_no_optimizer_waiting(directory: JobDirectory) -> None:
    committer = make(directory)
    committer._snapshot = FailingSnapshot()
    begin(committer, FIRST, make_state())
    optimizer = threading.Thread(target=committer.protect, daemon=True)
    optimizer.start()
    optimizer.join(timeout=10)
    assert not optimizer.is_alive()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        committer.wait()
    assert choose_checkpoint(directory).checkpoint is None


def test_a_kill_before_any_system_call_leaves_the_last_commit_or_the_next(tmp_path: Path) -> None:
    """SIGKILL to a process that commits, before each call by which it changes a file; see `killed_commits`."""
    source, library = Path(__file__).with_name("kill_at.c"), tmp_path / "kill_at.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.support.killed_commits", tmp_path / "jobs"],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(one["equal"] and one["skipped"] == 0 for one in found)
    steps = [one["step"] for one in found]
    assert steps == sorted(steps), "what is committed stays so"
    assert set(steps) == {5, 10}
    assert [one["killed"] for one in found] == [True] * (len(found) - 1) + [False]
    assert len(found) > 30
