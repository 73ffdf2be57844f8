"""Writing in the background: callers never wait for the volume, lines keep their order, the newest state wins."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotune_trainer import files
from spotune_trainer.observability.background_writer import BackgroundWriter


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    found = BackgroundWriter()
    found.start()
    yield found
    found.close()


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A volume that blocks every write until the event is set."""
    answers = threading.Event()
    append, replace = files.append_json, files.write_json

    def append_late(path: Path, value: Any) -> None:
        assert answers.wait(30)
        append(path, value)

    def replace_late(path: Path, value: Any, *, durable: bool = True) -> None:
        assert answers.wait(30)
        replace(path, value, durable=durable)

    monkeypatch.setattr(files, "append_json", append_late)
    monkeypatch.setattr(files, "write_json", replace_late)
    yield answers
    answers.set()


def test_callers_do_not_wait_for_a_blocked_volume(
    tmp_path: Path, volume: threading.Event, writer: BackgroundWriter
) -> None:
    for step in range(5):
        writer.append(tmp_path / "steps", {"step": step})
        writer.replace(tmp_path / "progress", {"step": step})
    assert list(tmp_path.iterdir()) == []
    volume.set()
    assert writer.flush()
    assert [line["step"] for line in files.read_lines(tmp_path / "steps")] == [0, 1, 2, 3, 4]
    assert files.read_json(tmp_path / "progress") == {"step": 4}


def test_closing_writes_everything_that_was_requested(tmp_path: Path, volume: threading.Event) -> None:
    writer = BackgroundWriter()
    writer.start()
    writer.append(tmp_path / "steps", {"step": 1})
    writer.replace(tmp_path / "progress", {"step": 1})
    threading.Timer(0.2, volume.set).start()
    writer.close()
    assert list(files.read_lines(tmp_path / "steps")) == [{"step": 1}]
    assert files.read_json(tmp_path / "progress") == {"step": 1}


def test_a_flush_does_not_wait_for_later_requests(
    tmp_path: Path, writer: BackgroundWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with steps that are faster than a slow volume."""
    append = files.append_json

    def append_and_request_more(path: Path, value: Any) -> None:
        append(path, value)
        writer.append(path, {"line": value["line"] + 1})

    monkeypatch.setattr(files, "append_json", append_and_request_more)
    writer.append(tmp_path / "lines", {"line": 0})
    assert writer.flush()


def test_refused_lines_are_retried_with_the_next_request_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: BackgroundWriter
) -> None:
    real = files.append_json

    def refuse(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "append_json", refuse)
    writer.append(tmp_path / "steps", {"step": 1})
    assert not writer.flush()
    monkeypatch.setattr(files, "append_json", real)
    writer.append(tmp_path / "steps", {"step": 2})
    assert writer.flush()
    assert list(files.read_lines(tmp_path / "steps")) == [{"step": 1}, {"step": 2}]


def test_a_bug_of_the_caller_is_raised_at_the_next_request(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    writer.start()
    writer.append(tmp_path / "steps", {"step": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.flush()
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.append(tmp_path / "steps", {"step": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.close()
