"""Carries files between the driver and nodes with directories of their own, if a bucket keeps the job.

On a shared volume, the driver reads what ranks log, and ranks read the driver's notices. Without one, the driver asks
each node twice a second: it sends its notices and the sizes of the files that it has, and gets what is new. So both
find the same files as on a volume, and nothing else has to know about it. Of a lost node, up to half a second is
missing; what ranks log is also in the bucket some seconds later.

Must be cheap to import: until it is, the agent of a node does not start.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from spotune_trainer import files
from spotune_trainer.job_directory.layout import LOG_SUFFIXES, GenerationLogs, JobDirectory

logger = logging.getLogger("spotune.driver")

_INTERVAL_SECONDS: Final = 0.5
_PART_BYTES: Final = 1 << 20
"""How much of a log one answer has at most."""


@dataclass(frozen=True)
class Notices:
    """The driver's notices: content of their files; None if there is none.

    Attributes:
        of_job: of the supervisor, for whatever group runs.
        of_generation: of the driver, for one group.
    """

    of_job: bytes | None
    of_generation: bytes | None


@dataclass(frozen=True)
class NewContent:
    """What a file of a node has that the driver lacks.

    Attributes:
        name: of the file, relative to the job's directory.
        start: first byte of `content` in the file; None if `content` replaces the file.
        content: the bytes.
        version: of a file that is replaced.
    """

    name: str
    start: int | None
    content: bytes
    version: int = 0


def exchange(
    directory: JobDirectory, generation: int, notices: Notices, known: Mapping[str, int]
) -> tuple[NewContent, ...]:
    """On a node: write the notices, and return what is new of a generation's files.

    Args:
        directory: of the node.
        generation: the newest one.
        notices: of the driver.
        known: size of each log that the driver has, and the version of each file that is replaced, by name.
    """
    logs = directory.generation_logs(generation)
    logs.root.mkdir(parents=True, exist_ok=True)
    _put(directory.notice, notices.of_job)
    _put(logs.notice, notices.of_generation)
    found = []
    for path in _files_of(directory, logs):
        name = str(path.relative_to(directory.root))
        with suppress(FileNotFoundError):  # replaced or deleted meanwhile
            new = _appended(path, name, known) if path.name.endswith(LOG_SUFFIXES) else _replaced(path, name, known)
            found += [new] if new is not None else []
    return tuple(found)


class Node(Protocol):
    """A node whose files the driver reads."""

    def exchange(self, generation: int, notices: Notices, known: Mapping[str, int]) -> Callable[[], Any]:
        """Start `exchange` there; returns a function that waits for its result. It raises what is the matter."""


class Relay:
    """The driver's side: writes what nodes have into the job's directory. A thread does so twice a second.

    Args:
        directory: of the job, on the head.
        nodes: returns the nodes whose agents are ready.
    """

    def __init__(self, directory: JobDirectory, nodes: Callable[[], Iterable[Node]]) -> None:
        self._directory = directory
        self._nodes = nodes
        self._versions: dict[str, int] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Start the thread, which ends with the process."""
        self._thread.start()

    def pull(self) -> None:
        """Have everything that the nodes have logged until now."""
        while self._pull_once():
            pass

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(_INTERVAL_SECONDS):
            try:
                self._pull_once()
            except OSError as error:  # the disk of the head is full
                logger.warning("the files of the workers cannot be written: %s", error)

    def _pull_once(self) -> bool:
        """Ask each node once. Returns whether one of them has more of a log."""
        with self._lock:
            generation = max(self._directory.generation_numbers(), default=0)
            if generation == 0:
                return False
            logs = self._directory.generation_logs(generation)
            notices = Notices(_read(self._directory.notice), _read(logs.notice))
            known = {**self._versions, **_sizes(self._directory, logs)}
            has_more = False
            for answer in [node.exchange(generation, notices, known) for node in self._nodes()]:
                try:
                    changes: Sequence[NewContent] = answer()
                except Exception as error:  # noqa: BLE001 - Ray's errors, of a node that is lost
                    logger.debug("a node does not answer: %s", error)
                    continue
                for change in changes:
                    self._write(change)
                    has_more |= change.start is not None and len(change.content) == _PART_BYTES
            return has_more

    def _write(self, change: NewContent) -> None:
        path = self._directory.root / change.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if change.start is None:
            files.write_bytes(path, change.content, durable=False)
            self._versions[change.name] = change.version
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, change.content, change.start)
        finally:
            os.close(descriptor)


def _files_of(directory: JobDirectory, logs: GenerationLogs) -> list[Path]:
    """The files that ranks of a generation have written on this node, except for what goes through the bucket."""
    found = [path for path in logs.root.iterdir() if path.is_file() and path not in (logs.notice, logs.agent_notice)]
    if logs.progress.exists():  # rank 0 is on this node
        found += [directory.harness, *directory.profile.glob("*")]
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _appended(path: Path, name: str, known: Mapping[str, int]) -> NewContent | None:
    start = known.get(name, 0)
    if path.stat().st_size <= start:
        return None
    with path.open("rb") as stream:
        stream.seek(start)
        return NewContent(name, start, stream.read(_PART_BYTES))


def _replaced(path: Path, name: str, known: Mapping[str, int]) -> NewContent | None:
    version = path.stat().st_mtime_ns
    if version == known.get(name):
        return None
    content = path.read_bytes()
    return NewContent(name, None, content, version) if content else None


def _put(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    elif _read(path) != content:
        files.write_bytes(path, content, durable=False)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _sizes(directory: JobDirectory, logs: GenerationLogs) -> dict[str, int]:
    """Size of each log of a generation here, by its name."""
    paths = [path for path in logs.root.glob("*") if path.name.endswith(LOG_SUFFIXES)]
    return {str(path.relative_to(directory.root)): path.stat().st_size for path in paths}
