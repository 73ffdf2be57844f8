"""A preemption trace: the number of available spot nodes over time."""

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
    """Available spot nodes over time.

    Attributes:
        changes: Pairs of (seconds, number of nodes from then on), starting at 0, in increasing order.
        seconds: Length of the trace.
    """

    changes: tuple[tuple[float, int], ...]
    seconds: float

    def repeated(self) -> Iterator[tuple[float, int]]:
        """Yield the changes of the trace, repeated endlessly."""
        begin = 0.0
        while True:
            yield from ((begin + seconds, nodes) for seconds, nodes in self.changes)
            begin += self.seconds


def read_trace(file: Path) -> Trace:
    """Read a trace from a CSV file with the columns ``seconds`` and ``nodes``; the last line marks the end.

    Raises:
        UsageError: The file cannot be read or is not a trace; the message names the line and what is expected.
    """
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            rows = csv.DictReader(stream)
            if not set(COLUMNS) <= set(rows.fieldnames or ()):
                raise UsageError(f"{file}: expected the columns {' and '.join(COLUMNS)} in its first line.")
            points = [_point(file, rows.line_num, row) for row in rows]
    except OSError as error:
        raise UsageError(f"{file}: cannot read the file: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{file}: is not a CSV file in UTF-8: {error}.") from error
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
        raise UsageError(f"{file}:{line}: seconds must be finite, and neither seconds nor nodes may be negative.")
    return seconds, nodes
