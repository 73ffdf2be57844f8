"""Segments of shared memory: their bytes outlive a killed process, and nothing is left once no process has them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, MEMORY_FILE, Label, Segment

LABEL = Label("step-00000010.gen-3", "rank-00001.safetensors", 5, "00ff")
_FORKING = multiprocessing.get_context("forkserver")


def write_and_die(segment: Segment) -> None:
    segment.resize(5)
    segment.map()[LABEL_BYTES:] = b"bytes"
    segment.label = LABEL
    os.kill(os.getpid(), signal.SIGKILL)


def content(segment: Segment) -> bytes:
    with segment.open() as opened:
        opened.seek(LABEL_BYTES)
        return opened.read()


def test_content_and_label_outlive_the_killed_process_that_wrote_them() -> None:
    segment = Segment.create()
    process = _FORKING.Process(target=write_and_die, args=(segment,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert segment.label == LABEL
    assert content(segment) == b"bytes"


def test_a_segment_is_no_file_of_any_folder_and_is_gone_with_its_last_holder() -> None:
    def segments() -> set[int]:
        """Inodes of the segments that this process holds; those of earlier tests may be freed at any time."""
        found = set()
        for link in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):  # it was closed meanwhile
                found |= {link.stat().st_ino} if MEMORY_FILE in str(link.readlink()) else set()
        return found

    before, files = segments(), set(Path("/dev/shm").iterdir())
    segment = Segment.create()
    segment.resize(1 << 20)
    (created,) = segments() - before
    assert not any(MEMORY_FILE in path.name for path in set(Path("/dev/shm").iterdir()) - files)
    del segment
    assert created not in segments()


def test_freeing_gives_the_memory_back() -> None:
    segment = Segment.create()
    assert segment.allocated_bytes == 0
    segment.resize(1 << 20)
    segment.label = LABEL
    assert segment.allocated_bytes >= 1 << 20
    segment.free()
    assert (segment.allocated_bytes, segment.content_bytes) == (0, 0)
    assert segment.label is None


def test_resizing_keeps_a_content_of_the_same_size_only() -> None:
    segment = Segment.create()
    segment.resize(5)
    segment.label = LABEL
    segment.resize(5)
    assert segment.label == LABEL
    segment.resize(6)
    assert segment.label is None
    assert content(segment) == bytes(6)


def test_a_label_that_is_not_complete_is_none() -> None:
    segment = Segment.create()
    segment.resize(5)
    assert segment.label is None
    with segment.map() as mapped:
        mapped[:20] = b'{"checkpoint": "step'
    assert segment.label is None
    segment.label = LABEL
    segment.label = None
    assert segment.label is None


def refuse(results: multiprocessing.Queue[object]) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    segment = Segment.create()
    segment.resize(1000)
    try:
        segment.resize(1 << 21)
    except OSError as error:
        results.put((error.errno, segment.allocated_bytes))


def test_memory_that_is_refused_is_an_error_and_leaves_the_segment_free() -> None:
    results: multiprocessing.Queue[object] = _FORKING.Queue()
    process = _FORKING.Process(target=refuse, args=(results,))
    process.start()
    assert results.get(timeout=120) == (errno.EFBIG, 0)
    process.join()


def test_a_segment_is_opened_for_reading_only() -> None:
    segment = Segment.create()
    segment.resize(5)
    with segment.open() as opened, pytest.raises(OSError, match="not open for writing"):
        opened.write(b"x")
