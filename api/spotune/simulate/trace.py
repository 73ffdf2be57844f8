"""A preemption trace: how many spot nodes there are at which time."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from spotune.errors import UsageError

COLUMNS = ("seconds", "nodes")


@dataclass(frozen=True)
class Trace:
    """Spot nodes over time.

    Attributes:
        changes: (seconds, nodes that there are from then on), the first at 0, rising in time.
        seconds: Its length.
    """

    changes: tuple[tuple[float, int], ...]
    seconds: float

    def repeated(self) -> Iterator[tuple[float, int]]:
        """The changes of the trace, again and again, one after the other."""
        begin = 0.0
        while True:
            yield from ((begin + seconds, nodes) for seconds, nodes in self.changes)
            begin += self.seconds


def read_trace(file: Path) -> Trace:
    """A trace from a CSV file with the columns ``seconds`` and ``nodes``; its last line is its end.

    Raises:
        UsageError: The file cannot be read, or is no trace; says where and what is expected.
    """
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            rows = csv.DictReader(stream)
            if not set(COLUMNS) <= set(rows.fieldnames or ()):
                raise UsageError(f"{file}: expected the columns {' and '.join(COLUMNS)} in its first line.")
            points = [_point(file, rows.line_num, row) for row in rows]
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}.") from error
    times = [seconds for seconds, _ in points]
    if len(points) < 2 or times[0] != 0 or any(later <= earlier for earlier, later in pairwise(times)):
        raise UsageError(f"{file}: expected two lines or more, the first at 0 seconds, each later than the one before.")
    return Trace(tuple(points[:-1]), times[-1])


def _point(file: Path, line: int, row: dict[str, str]) -> tuple[float, int]:
    try:
        seconds, nodes = float(row["seconds"]), int(row["nodes"])
    except (TypeError, ValueError) as error:
        raise UsageError(f"{file}:{line}: expected a number of seconds and a whole number of nodes.") from error
    if not 0 <= seconds < float("inf") or nodes < 0:
        raise UsageError(f"{file}:{line}: seconds and nodes cannot be negative, and seconds have an end.")
    return seconds, nodes
