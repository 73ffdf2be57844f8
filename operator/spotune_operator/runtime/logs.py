"""The operator's log: one JSON object a line, with the job or service in whose reconcile it was written."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from spotune_operator.observe.state import JobKey

_context: ContextVar[dict[str, str]] = ContextVar("context")


@contextmanager
def log_context(key: JobKey, kind: Literal["job", "service", "sweep"] = "job") -> Iterator[None]:
    """Add namespace and name of this object to everything logged within the block."""
    token = _context.set({"namespace": key[0], kind: key[1]})
    try:
        yield
    finally:
        _context.reset(token)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON: time, level, logger, message; and the job or service and the traceback, if any."""
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        content |= _context.get({})
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False)


def log_as_json(level: int = logging.INFO) -> None:
    """Log to standard error in this format, without kopf's own records about each event."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
