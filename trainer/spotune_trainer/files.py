"""Crash-safe files: atomic replacement, appended JSON lines, and reading them back.

All files on a job's volume are written by these functions, so they survive a kill at any time. A file is replaced by
writing a temporary file, fsync and rename, so readers find either the old or the new content. A log grows by one
`write` a line, and readers ignore an incomplete last line.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spotune.errors import SpotuneError

INVALID_CONTENT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What a value raises that has not the fields or types that a reader expects."""


_MAX_PATH_BYTES = 1024


class UnreadableFileError(SpotuneError, ValueError):
    """A file of a run has content that this version of spotune has not written."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what wrong content of a file raises into an UnreadableFileError that names the file."""
    try:
        yield
    except SpotuneError:
        raise
    except INVALID_CONTENT as error:
        raise UnreadableFileError(
            f"{path} has content that this version of spotune cannot read ({type(error).__name__}: {error}): it was "
            "damaged, edited by hand, or written by another version"
        ) from error


def is_inner_path(name: str) -> bool:
    """Whether a name that somebody else has written leads to a place below a folder, on every file system."""
    parts = name.split("/")
    lengths = [len(part.encode(errors="replace")) for part in parts]
    return (
        name.isprintable()
        and not {"", ".", ".."} & set(parts)
        and max(lengths) <= 255
        and sum(lengths) <= _MAX_PATH_BYTES
    )


def fsync_file(path: Path) -> None:
    """Make the content of `path` durable, whichever process wrote it."""
    _fsync(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Make new and renamed entries of the directory `path` durable."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def fsync_tree(path: Path, heartbeat: Callable[[], None] = lambda: None) -> None:
    """Make the whole tree of the directory `path` durable. `heartbeat` is called after each file and directory."""
    for each in path.rglob("*"):
        if each.is_dir():
            fsync_directory(each)
        else:
            fsync_file(each)
        heartbeat()
    fsync_directory(path)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill. It becomes `path` once it is durable, and is removed after an error."""
    _remove_abandoned(path)
    with _temporary_directory(path) as temporary:
        yield temporary
        fsync_tree(temporary)
        temporary.rename(path)
        fsync_directory(path.parent)


@contextmanager
def replacing_directory(
    path: Path, before_replacing: Callable[[], None], heartbeat: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """As `new_directory`, and replaces a directory at `path`. A kill leaves the old one, the new one, or none.

    Args:
        path: the directory.
        before_replacing: called once the new one is durable; if it raises, nothing is replaced.
        heartbeat: called after each file is made durable.
    """
    _remove_abandoned(path)
    with _temporary_directory(path) as temporary:
        yield temporary
        fsync_tree(temporary, heartbeat)
        before_replacing()
        if path.exists():
            with _temporary_directory(path) as old:
                path.rename(old)
                temporary.rename(path)
        else:
            temporary.rename(path)
        fsync_directory(path.parent)


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary directories of `path` that a killed process has left."""
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        shutil.rmtree(abandoned, ignore_errors=True)


@contextmanager
def _temporary_directory(path: Path) -> Iterator[Path]:
    """A new directory beside `path`, which is removed at the end."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` atomically; `durable` also waits for the disk, which a heartbeat does not need."""
    write_bytes(path, text.encode(), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """As `write_text`."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:  # do not leave a partial file on a full volume
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace `path` by the JSON of `value`, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n", durable=durable)


def content_hash(value: Any) -> str:
    """SHA-256, in hex, of `value`, which JSON can represent."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def content_key(value: Any) -> str:
    """A name for `value`, which JSON can represent: the first 16 digits of its hash."""
    return content_hash(value)[:16]


def read_json(path: Path) -> Any | None:
    """The JSON object in `path`, or None if the file does not exist.

    Raises:
        UnreadableFileError: the file is not a JSON object, so `write_json` has not written it.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UnreadableFileError(f"{path} is not valid JSON ({error}); it was damaged or edited by hand") from error
    if not isinstance(value, dict):
        raise UnreadableFileError(f"{path} is not a JSON object; it was damaged or edited by hand")
    return value


def append_json(path: Path, value: Any) -> None:
    """Append `value` as one line; concurrent appenders on one host do not mix their lines.

    Raises:
        OSError: the volume has no space for the whole line; readers ignore the part that was written.
    """
    line = (json.dumps(value, separators=(",", ":")) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if _has_partial_last_line(descriptor):
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _has_partial_last_line(descriptor: int) -> bool:
    """Whether the last line is incomplete, because the volume was full."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


class LineReader:
    """Reads the complete lines of a growing JSON-lines file that were added since the last call."""

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
        records = [_record(line) for line in data[:whole].splitlines()]
        return [record for record in records if record is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for an incomplete one, whose writer got an error from `append_json`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All complete records of a JSON-lines file in order; none if the file does not exist."""
    yield from LineReader(path).read()


def cache_directory() -> Path:
    """Node-local folder for downloaded files, shared by all ranks of a node and by later attempts.

    `$SPOTUNE_CACHE`, or else `~/.cache/spotune`.
    """
    return Path(os.environ.get("SPOTUNE_CACHE") or Path.home() / ".cache" / "spotune")
