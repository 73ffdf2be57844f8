"""Asynchronous checkpointing: the staged state is saved, one commit at a time, with retries if the volume fails."""

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
from spotune_trainer.checkpoint import async_checkpointer, writer
from spotune_trainer.checkpoint.async_checkpointer import AsyncCheckpointer, CommitResult
from spotune_trainer.checkpoint.fragment import Fragment, FragmentSource
from spotune_trainer.checkpoint.generations import choose_checkpoint, claim
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, FileEntry, open_checkpoint, rank_ok
from spotune_trainer.checkpoint.reader import read_parameters, verify
from spotune_trainer.checkpoint.snapshot import Snapshot
from spotune_trainer.job_directory.layout import JobDirectory
from tests import ROOT
from tests.trainer.support.checkpoints import State, fragments_of_rank, make_manifest, make_state
from tests.trainer.support.waiting import wait_until

FIRST, SECOND = CheckpointName(5, 1), CheckpointName(10, 1)


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    found = JobDirectory(tmp_path)
    claim(found, None)
    return found


@pytest.fixture(autouse=True)
def _short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_checkpointer, "_FIRST_RETRY_SECONDS", 0.01)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Blocks all writes of fragments until the event is set."""
    opened = threading.Event()

    def blocked_write(*arguments: object) -> FileEntry:
        assert opened.wait(30)
        return writer.write_fragments(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(async_checkpointer, "write_fragments", blocked_write)
    yield opened
    opened.set()


def make_checkpointer(directory: JobDirectory, rank: int = 0, world_size: int = 1, keep: int = 2) -> AsyncCheckpointer:
    return AsyncCheckpointer(directory, rank, world_size, CheckpointSpec(keep=keep))


def save(
    checkpointer: AsyncCheckpointer, name: CheckpointName, state: State, rank: int = 0, world_size: int = 1
) -> None:
    checkpointer.save(name, fragments_of_rank(state, world_size, rank), lambda entries: make_manifest(name, entries))


def whole(directory: JobDirectory, name: CheckpointName) -> Checkpoint:
    found = open_checkpoint(directory.checkpoints / str(name))
    assert isinstance(found, Checkpoint)
    verify(found)
    return found


def saved(directory: JobDirectory, name: CheckpointName) -> torch.Tensor:
    return read_parameters(whole(directory, name))["layer.weight"].flatten()


def test_saves_the_state_at_the_time_of_the_call(directory: JobDirectory, gate: threading.Event) -> None:
    checkpointer, state = make_checkpointer(directory), make_state()
    before = state["layer.weight/fp32"].clone()
    save(checkpointer, FIRST, state)
    state["layer.weight/fp32"].fill_(7.0)  # the next step
    assert checkpointer.is_busy
    assert checkpointer.poll() is None
    gate.set()
    result = checkpointer.wait()
    assert result is not None
    assert result.manifest is not None
    assert result.manifest.step == 5
    assert result.stall_seconds < result.seconds
    assert torch.equal(saved(directory, FIRST), before)
    assert not checkpointer.is_busy
    assert checkpointer.wait() is None


def test_a_second_save_while_one_is_pending_is_an_error(directory: JobDirectory, gate: threading.Event) -> None:
    checkpointer = make_checkpointer(directory)
    save(checkpointer, FIRST, make_state())
    with pytest.raises(AssertionError, match="one commit at a time"):
        save(checkpointer, SECOND, make_state())
    gate.set()
    checkpointer.wait()


def test_rank_0_commits_once_all_ranks_have_written(directory: JobDirectory) -> None:
    state = make_state()
    first, second = make_checkpointer(directory, 0, 2), make_checkpointer(directory, 1, 2)
    save(first, FIRST, state, 0, 2)
    time.sleep(0.2)
    assert first.is_busy
    save(second, FIRST, state, 1, 2)
    other, result = second.wait(), first.wait()
    assert isinstance(other, CommitResult)
    assert isinstance(result, CommitResult)
    assert other.manifest is None
    assert result.manifest is not None
    assert torch.equal(saved(directory, FIRST), state["layer.weight/fp32"])


def test_old_checkpoints_are_pruned_in_the_background(directory: JobDirectory) -> None:
    checkpointer = make_checkpointer(directory, keep=1)
    for name in (FIRST, SECOND):
        save(checkpointer, name, make_state(name.step))
        checkpointer.wait()
    assert [path.name for path in directory.checkpoints.iterdir()] == [str(SECOND)]


def test_a_failing_volume_is_retried_and_the_last_commit_stays(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, state = make_checkpointer(directory), make_state(5)
    save(checkpointer, FIRST, state)
    checkpointer.wait()
    is_full = threading.Event()
    is_full.set()
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if is_full.is_set() and len(data) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    save(checkpointer, SECOND, make_state(10))
    assert wait_until(lambda: checkpointer.problem is not None, timeout_seconds=60)
    assert checkpointer.problem == (
        "the commit of step 10 failed and will be retried: [Errno 28] No space left on device"
    )
    assert checkpointer.is_busy
    assert choose_checkpoint(directory).checkpoint == whole(directory, FIRST)
    folder = directory.checkpoints / str(SECOND)
    assert wait_until(lambda: list(folder.iterdir()) == [], timeout_seconds=60), "a partial file would take up space"
    is_full.clear()
    result = checkpointer.wait()
    assert result is not None
    assert checkpointer.problem is None
    assert choose_checkpoint(directory).checkpoint == whole(directory, SECOND)


def test_a_slow_commit_is_reported_as_a_problem(directory: JobDirectory, gate: threading.Event) -> None:
    now = [1000.0]
    checkpointer = AsyncCheckpointer(directory, 0, 1, CheckpointSpec(), clock=lambda: now[0])
    save(checkpointer, FIRST, make_state())
    now[0] += 119
    assert checkpointer.problem is None
    now[0] += 61
    assert checkpointer.problem == "the commit of step 5 has been running for 3 min"
    gate.set()
    checkpointer.wait()


def test_a_commit_progresses_while_any_rank_writes_or_retries(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, state = [1000.0], make_state()
    first = AsyncCheckpointer(directory, 0, 2, CheckpointSpec(), clock=lambda: now[0])
    second = AsyncCheckpointer(directory, 1, 2, CheckpointSpec(), clock=lambda: now[0])

    def progresses(checkpointer: AsyncCheckpointer) -> bool:
        now[0] += 1
        return checkpointer.has_progressed()

    assert not progresses(first)
    save(first, FIRST, state, 0, 2)
    assert wait_until(lambda: (directory.checkpoints / str(FIRST) / rank_ok(0)).exists(), timeout_seconds=60)
    assert progresses(first)
    assert not progresses(first), "it waits for the other rank, which has written nothing"
    real = os.write

    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", refuse)
    save(second, FIRST, state, 1, 2)
    for _ in range(3):
        assert wait_until(lambda: progresses(second), timeout_seconds=60), (
            "each failed attempt shows that the volume responds"
        )
    assert wait_until(lambda: progresses(first), timeout_seconds=60)
    monkeypatch.setattr(os, "write", real)
    second.wait()
    assert not second.has_progressed()
    assert first.wait() is not None


def test_a_superseded_generation_commits_nothing(directory: JobDirectory, gate: threading.Event) -> None:
    checkpointer = make_checkpointer(directory)
    save(checkpointer, FIRST, make_state())
    claim(directory, None)
    gate.set()
    with pytest.raises(SupersededError, match="generation 1 was superseded"):
        checkpointer.wait()
    assert choose_checkpoint(directory).checkpoint is None


def test_wait_calls_back_while_it_waits(directory: JobDirectory, gate: threading.Event) -> None:
    checkpointer = make_checkpointer(directory)
    save(checkpointer, FIRST, make_state())
    assert checkpointer.wait(gate.set) is not None


def test_snapshots_reuse_their_memory() -> None:
    snapshot, state = Snapshot(), make_state()
    snapshot.reserve(fragments_of_rank(state, 1, 0))
    addresses = set()
    for _ in range(3):
        before = state["layer.weight/exp_avg"].clone()
        snapshot.take(fragments_of_rank(state, 1, 0))
        snapshot.wait_for_staging()
        for tensor in state.values():
            tensor.add_(1.0)
        copy = snapshot.fragments()[0]
        addresses.add(copy.states["fp32"].data_ptr())
        assert torch.equal(copy.states["exp_avg"], before)
    assert len(addresses) == 1


class FailingSnapshot(Snapshot):
    """Like a GPU without memory for a copy on the device, and whose copies to the host fail."""

    def take(self, fragments: Sequence[FragmentSource]) -> None:
        super().take(fragments)
        self._staged.clear()
        self._sources = [state for fragment in fragments for state in fragment.states.values()]
        self._reads_originals = True

    def fragments(self) -> list[Fragment]:
        self._copy_to_host = self._fail  # type: ignore[method-assign]
        return super().fragments()

    def _fail(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_failed_copy_ends_its_commit_and_unblocks_the_optimizer(directory: JobDirectory) -> None:
    checkpointer = make_checkpointer(directory)
    checkpointer._snapshot = FailingSnapshot()
    save(checkpointer, FIRST, make_state())
    optimizer = threading.Thread(target=checkpointer.wait_for_staging, daemon=True)
    optimizer.start()
    optimizer.join(timeout=60)
    assert not optimizer.is_alive()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        checkpointer.wait()
    assert choose_checkpoint(directory).checkpoint is None


def test_a_kill_at_any_system_call_leaves_the_last_commit_or_the_next(tmp_path: Path) -> None:
    """Kills a committing process before each system call that changes a file; see `killed_commits`."""
    source, library = ROOT / "tests/trainer/support/kill_at.c", tmp_path / "kill_at.so"
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
    assert steps == sorted(steps), "a commit is never undone"
    assert set(steps) == {5, 10}
    assert [one["killed"] for one in found] == [True] * (len(found) - 1) + [False]
    assert len(found) > 30


def test_abandoned_commit_ends_and_leaves_no_checkpoint(directory: JobDirectory) -> None:
    checkpointer = make_checkpointer(directory, world_size=2)
    save(checkpointer, FIRST, make_state(), world_size=2)
    assert wait_until(lambda: (directory.checkpoints / str(FIRST) / rank_ok(0)).exists(), 60.0)
    checkpointer.abandon()  # rank 1 will never write its file
    assert not any(thread.name == "commit" for thread in threading.enumerate())
    assert choose_checkpoint(directory).checkpoint is None


def test_abandoned_commit_does_not_retry_on_a_volume_that_refuses_it(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_checkpointer, "_FIRST_RETRY_SECONDS", 60.0)
    checkpointer = make_checkpointer(directory)
    directory.checkpoints.write_text("not a folder")
    save(checkpointer, FIRST, make_state())
    assert wait_until(lambda: checkpointer.problem is not None, 60.0)
    checkpointer.abandon()
    assert not any(thread.name == "commit" for thread in threading.enumerate())


def test_a_rank_may_begin_the_next_commit_before_rank_0_has_completed_the_last_one(directory: JobDirectory) -> None:
    """Only rank 0 waits for the files of all, and then deletes older checkpoints: no files of the next one."""
    first, second = (make_checkpointer(directory, rank, 2, keep=1) for rank in (0, 1))
    for name in (FIRST, SECOND):
        save(second, name, make_state(name.step), 1, 2)
        assert second.wait() is not None
    for name in (FIRST, SECOND):
        save(first, name, make_state(name.step), 0, 2)
        assert wait_until(lambda: not first.is_busy, timeout_seconds=60)
        assert first.wait() is not None
        whole(directory, name)
