"""Log files on the job's volume: one format of lines, so that files of many processes can be read in order of time."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z(?= )")
_OURS = "spotune"


def stamp(seconds: float) -> str:
    """A time as lines begin with it: UTC to the millisecond, `2026-01-31T08:15:00.250Z`, which sorts as text.

    Args:
        seconds: since the epoch.
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def stamp_of(line: str) -> str:
    """The time that a line begins with; empty for one that goes on with the line before, as in a traceback."""
    found = _STAMP.match(line)
    return found[0] if found else ""


class LineFormatter(logging.Formatter):
    """Time, level and text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - its name there
        """The record's time, as `stamp` writes it."""
        return stamp(record.created)


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Meanwhile write what this process logs to a file too: what is ours, and the warnings of others."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(LineFormatter())
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.split(".")[0] == _OURS)
    root, ours = logging.getLogger(), logging.getLogger(_OURS)
    level = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(level)
        root.removeHandler(handler)
        handler.close()
