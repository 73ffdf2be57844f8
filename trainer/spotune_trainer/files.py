"""Files that survive a kill at any moment: atomic replacement, appended JSON lines, and reading them back.

Everything on a job's volume is written through these few functions, so the rules hold everywhere: a file is either
the old one or the new one (write beside, fsync, rename), and a log only grows by whole lines (one `write` on a file
opened for appending); a reader ignores an unfinished last line.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def fsync_directory(path: Path) -> None:
    """Make renames and new names within `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` atomically; `durable` also waits for the disk (not wanted for a heartbeat)."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())
    temporary.replace(path)
    if durable:
        fsync_directory(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace `path` by the JSON of `value`, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n", durable=durable)


def read_json(path: Path) -> Any | None:
    """The value in `path`, or None where there is no such file.

    Raises:
        ValueError: the file is not JSON; it was not written by `write_json`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); it was damaged or edited by hand") from error


def append_json(path: Path, value: Any) -> None:
    """Append `value` as one line; concurrent appenders on one host do not mix their lines."""
    line = json.dumps(value, separators=(",", ":")) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


class LineReader:
    """Reads the whole lines that were added to a growing JSON-lines file since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The records added since the last call; none while the file does not exist."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return [json.loads(line) for line in data[:whole].splitlines() if line.strip()]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole record of a JSON-lines file, in order; none where there is no file."""
    yield from LineReader(path).read()
