"""All logs of a run, merged by time: drivers, workers of all generations, and events of the ledger.

Usage:
    python -m spotune_trainer.observability.logs.run_logs DIR [--follow] [--lines N]

The logs lie on the volume, so they can be read after their processes are gone. Attempts follow one another. Within an
attempt, lines are sorted by time, and each starts with its source: `driver-3`, `gen-7/worker-0`, or `job` for events
of the ledger.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from spotune.errors import UsageError
from spotune_trainer.files import reading
from spotune_trainer.job_directory.events import EventReader
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.logs.event_messages import with_messages
from spotune_trainer.observability.logs.line_format import format_timestamp, timestamp_of

_POLL_SECONDS = 1.0
_BATCH_CHARACTERS = 1 << 16
_LATEST = 2
"""How many of the newest attempts, and of the newest generations of each, are followed: a lost one may still write."""

_Line = tuple[str, str]
"""Timestamp that lines are sorted by, and text."""


@dataclass
class _Attempt:
    """One driver: the unread events until the next attempt, and the generations that it started."""

    number: int
    events: list[_Line] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)


class _Tail:
    """Reads the new complete lines of a growing file."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._path = path
        self._offset = 0
        self._timestamp = ""

    def new_lines(self) -> Iterator[_Line]:
        """The complete lines after the last one that was yielded; a line without a timestamp gets the previous one."""
        try:
            stream = self._path.open("rb")
        except FileNotFoundError:
            return
        with stream:
            if not self._timestamp:  # stacks of a hang have no timestamps: use the file's time
                self._timestamp = format_timestamp(self._path.stat().st_mtime) if self._path.suffix == ".txt" else ""
            stream.seek(self._offset)
            for content in stream:
                if not content.endswith(b"\n"):
                    return
                self._offset += len(content)
                text = content.decode(errors="replace").rstrip("\n")
                self._timestamp = timestamp_of(text) or self._timestamp
                yield self._timestamp, f"{self._name}: {text}"


class RunLogs:
    """Reads the logs of one job; returns each line at most once."""

    def __init__(self, directory: JobDirectory) -> None:
        self._directory = directory
        self._ledger = EventReader(directory.ledger)
        self._attempts = [_Attempt(0)]
        self._tails: dict[Path, _Tail] = {}

    def all_lines(self) -> Iterator[str]:
        """All unread lines of all attempts."""
        self._read_ledger()
        for attempt in self._attempts:
            for _, text in self._lines_of(attempt):
                yield text

    def last_lines(self, count: int) -> list[str]:
        """The last `count` lines; marks all earlier lines as read."""
        self._read_ledger()
        found: deque[str] = deque()
        for age, attempt in enumerate(reversed(self._attempts)):
            if len(found) < count:
                lines = deque((text for _, text in self._lines_of(attempt)), maxlen=count - len(found))
                found.extendleft(reversed(lines))
            elif age < _LATEST:
                deque(self._lines_of(attempt, _LATEST), maxlen=0)
        return list(found)

    def new_lines(self) -> list[str]:
        """The lines of the newest attempts that were written since the last call, sorted by time."""
        self._read_ledger()
        lines = [line for attempt in self._attempts[-_LATEST:] for line in self._lines_of(attempt, _LATEST)]
        return [text for _, text in sorted(lines, key=itemgetter(0))]

    def _read_ledger(self) -> None:
        """Take new events from the ledger. A generation belongs to the attempt that started last before it."""
        with reading(self._ledger.path):
            for record, text in with_messages(self._ledger.read()):
                if record["event"] == "attempt-started":
                    self._attempts.append(_Attempt(record["attempt"]))
                if record["event"] == "generation-started":
                    self._attempts[-1].generations.append(record["generation"])
                if text:
                    self._attempts[-1].events.append(_event_line(record["time"], text))

    def _lines_of(self, attempt: _Attempt, latest: int = 0) -> Iterator[_Line]:
        """The unread lines of an attempt, sorted by time; of its newest `latest` generations, or of all (0)."""
        events, attempt.events = attempt.events, []
        driver = self._tail(f"driver-{attempt.number}", self._directory.driver_log(attempt.number))
        workers = itertools.chain.from_iterable(map(self._lines_of_generation, attempt.generations[-latest:]))
        return heapq.merge(events, driver.new_lines(), workers, key=itemgetter(0))

    def _lines_of_generation(self, generation: int) -> Iterator[_Line]:
        root = self._directory.generation_logs(generation).root
        paths = sorted((*root.glob("worker-*.log"), *root.glob("stacks-rank-*.txt")), key=_by_rank)
        tails = [self._tail(f"gen-{generation}/{path.stem}", path) for path in paths]
        return heapq.merge(*(tail.new_lines() for tail in tails), key=itemgetter(0))

    def _tail(self, name: str, path: Path) -> _Tail:
        return self._tails.setdefault(path, _Tail(name, path))


def _event_line(seconds: float, text: str) -> _Line:
    return format_timestamp(seconds), f"job: {format_timestamp(seconds)} {text}"


def _by_rank(path: Path) -> tuple[str, int]:
    kind, _, rank = path.stem.rpartition("-")
    return kind, int(rank)


def stream(directory: JobDirectory, lines: int | None, follow: Callable[[], bool] | None) -> Iterator[str]:
    """A run's logs, oldest first, in batches of complete lines.

    Args:
        directory: the job's folder.
        lines: number of last lines to start with; None for all.
        follow: waits a little and returns whether to poll again; None to end after the existing lines.
    """
    logs = RunLogs(directory)
    yield from _batches(logs.all_lines() if lines is None else logs.last_lines(lines))
    while follow is not None and follow():
        yield from _batches(logs.new_lines())


def _batches(lines: Iterable[str]) -> Iterator[str]:
    """Lines with their newlines, joined into batches: single lines would each be a write to a socket."""
    batch, size = [], 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= _BATCH_CHARACTERS:
            yield "\n".join([*batch, ""])
            batch, size = [], 0
    if batch:
        yield "\n".join([*batch, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the logs of a job.

    Raises:
        UsageError: its folder does not exist.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the job's folder on the volume")
    parser.add_argument("--follow", action="store_true", help="keep printing new lines")
    parser.add_argument("--lines", type=int, metavar="N", help="print only the last N lines")
    options = parser.parse_args(arguments)
    if not options.directory.is_dir():
        raise UsageError(f"there is no folder {options.directory}: the run has not started, or its folder was removed")
    for batch in stream(JobDirectory(options.directory), options.lines, _pause if options.follow else None):
        sys.stdout.write(batch)
        sys.stdout.flush()


def _pause() -> bool:
    time.sleep(_POLL_SECONDS)
    return True


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(str(error))
    except (KeyboardInterrupt, BrokenPipeError):  # the reader has closed the pipe
        sys.exit(0)
