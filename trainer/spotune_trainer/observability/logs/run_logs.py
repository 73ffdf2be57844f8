"""All logs of a run in order: of every driver, of the workers of every generation, and what the ledger tells.

Usage:
    python -m spotune_trainer.observability.logs.run_logs DIR [--follow] [--lines N]

They lie on the volume, so they can be read whatever has become of the processes that wrote them. Attempts follow one
another; within one, lines come in order of time, each after the name of whose it is: `driver-3`, `gen-7/worker-0`, or
`job` for what the ledger tells.
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
from spotune_trainer.files import LineReader
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.logs.event_messages import sentence
from spotune_trainer.observability.logs.line_format import stamp, stamp_of

_POLL_SECONDS = 1.0
_PIECE_CHARACTERS = 1 << 16
_LATEST = 2
"""So many attempts, and generations of each, may still grow: a lost one may have more to say than its successor."""

_Line = tuple[str, str]
"""Time by which lines are ordered, and text."""


@dataclass
class _Attempt:
    """One driver: the events of its time, and the generations that it started."""

    number: int
    events: list[_Line] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)


class _Tail:
    """The whole lines of a growing file that were not read yet."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._path = path
        self._offset = 0
        self._stamp = ""

    def lines(self) -> Iterator[_Line]:
        """The lines since the last one that was taken."""
        try:
            stream = self._path.open("rb")
        except FileNotFoundError:
            return
        with stream:
            if not self._stamp:  # stacks of a hang have no times: they are put where they were written
                self._stamp = stamp(self._path.stat().st_mtime) if self._path.suffix == ".txt" else ""
            stream.seek(self._offset)
            for content in stream:
                if not content.endswith(b"\n"):
                    return
                self._offset += len(content)
                text = content.decode(errors="replace").rstrip("\n")
                self._stamp = stamp_of(text) or self._stamp
                yield self._stamp, f"{self._name}: {text}"


class RunLogs:
    """Reads the logs of one job; what was read once does not come again."""

    def __init__(self, directory: JobDirectory) -> None:
        self._directory = directory
        self._ledger = LineReader(directory.ledger)
        self._attempts = [_Attempt(0)]
        self._tails: dict[Path, _Tail] = {}

    def history(self) -> Iterator[str]:
        """All lines there are."""
        self._read_ledger()
        for attempt in self._attempts:
            for _, text in self._lines_of(attempt):
                yield text

    def last(self, count: int) -> list[str]:
        """The last lines; those before them do not come any more."""
        self._read_ledger()
        found: deque[str] = deque()
        for age, attempt in enumerate(reversed(self._attempts)):
            if len(found) < count:
                lines = deque((text for _, text in self._lines_of(attempt)), maxlen=count - len(found))
                found.extendleft(reversed(lines))
            elif age < _LATEST:
                deque(self._lines_of(attempt, _LATEST), maxlen=0)
        return list(found)

    def news(self) -> list[str]:
        """The lines since the last look, by time."""
        self._read_ledger()
        lines = [line for attempt in self._attempts[-_LATEST:] for line in self._lines_of(attempt, _LATEST)]
        return [text for _, text in sorted(lines, key=itemgetter(0))]

    def _read_ledger(self) -> None:
        """Which attempts there are, and what happened meanwhile; a generation belongs to the attempt before it."""
        for record in self._ledger.read():
            if record["event"] == "attempt-started":
                self._attempts.append(_Attempt(record["attempt"]))
            if record["event"] == "generation-started":
                self._attempts[-1].generations.append(record["generation"])
            if text := sentence(record):
                self._attempts[-1].events.append(_event_line(record["time"], text))

    def _lines_of(self, attempt: _Attempt, latest: int = 0) -> Iterator[_Line]:
        """The unread lines of an attempt, by time; with `latest`, of its last so many generations only."""
        events, attempt.events = attempt.events, []
        driver = self._tail(f"driver-{attempt.number}", self._directory.driver_log(attempt.number))
        workers = itertools.chain.from_iterable(map(self._lines_of_generation, attempt.generations[-latest:]))
        return heapq.merge(events, driver.lines(), workers, key=itemgetter(0))

    def _lines_of_generation(self, generation: int) -> Iterator[_Line]:
        root = self._directory.generation_logs(generation).root
        paths = sorted((*root.glob("worker-*.log"), *root.glob("stacks-rank-*.txt")), key=_by_rank)
        tails = [self._tail(f"gen-{generation}/{path.stem}", path) for path in paths]
        return heapq.merge(*(tail.lines() for tail in tails), key=itemgetter(0))

    def _tail(self, name: str, path: Path) -> _Tail:
        return self._tails.setdefault(path, _Tail(name, path))


def _event_line(seconds: float, text: str) -> _Line:
    return stamp(seconds), f"job: {stamp(seconds)} {text}"


def _by_rank(path: Path) -> tuple[str, int]:
    kind, _, rank = path.stem.rpartition("-")
    return kind, int(rank)


def stream(directory: JobDirectory, lines: int | None, follow: Callable[[], bool] | None) -> Iterator[str]:
    """A run's logs, oldest first, in pieces of whole lines.

    Args:
        directory: of the job.
        lines: only so many of the last ones; None: all.
        follow: waits a little, and says whether to look for more; None: end after what there is.
    """
    logs = RunLogs(directory)
    yield from _pieces(logs.history() if lines is None else logs.last(lines))
    while follow is not None and follow():
        yield from _pieces(logs.news())


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Lines with their ends, many at a time: one by one they would be as many writes to a socket."""
    piece, size = [], 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= _PIECE_CHARACTERS:
            yield "\n".join([*piece, ""])
            piece, size = [], 0
    if piece:
        yield "\n".join([*piece, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the logs of a job's folder.

    Raises:
        UsageError: there is no such folder.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the job's folder on the volume")
    parser.add_argument("--follow", action="store_true", help="go on with what is written from now on")
    parser.add_argument("--lines", type=int, metavar="N", help="only the last N lines")
    options = parser.parse_args(arguments)
    if not options.directory.is_dir():
        raise UsageError(f"there is no folder {options.directory}: the run has not begun, or it was removed")
    for piece in stream(JobDirectory(options.directory), options.lines, _pause if options.follow else None):
        sys.stdout.write(piece)
        sys.stdout.flush()


def _pause() -> bool:
    time.sleep(_POLL_SECONDS)
    return True


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(str(error))
    except (KeyboardInterrupt, BrokenPipeError):  # who read it has seen enough
        sys.exit(0)
