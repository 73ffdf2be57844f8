"""The line format of all log files on the job's volume; every line starts with a timestamp that sorts as text."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z(?= )")
_OWN_LOGGER = "spotune"


def format_timestamp(seconds: float) -> str:
    """A time in UTC with milliseconds, such as `2026-01-31T08:15:00.250Z`.

    Args:
        seconds: seconds since the epoch.
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def timestamp_of(line: str) -> str:
    """The timestamp at the start of a line; empty for a continuation line, as in a traceback."""
    found = _TIMESTAMP.match(line)
    return found[0] if found else ""


class LineFormatter(logging.Formatter):
    """Formats a record as timestamp, level and message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        """The record's time, by `format_timestamp`."""
        return format_timestamp(record.created)


@contextmanager
def logging_to_file(path: Path) -> Iterator[None]:
    """Also write this process's logs to a file: all of spotune's records, and warnings of other libraries."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(LineFormatter())
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.split(".")[0] == _OWN_LOGGER)
    root, own = logging.getLogger(), logging.getLogger(_OWN_LOGGER)
    level = own.level
    root.addHandler(handler)
    own.setLevel(logging.INFO)
    try:
        yield
    finally:
        own.setLevel(level)
        root.removeHandler(handler)
        handler.close()
