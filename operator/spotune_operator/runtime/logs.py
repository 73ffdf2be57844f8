"""The operator's log: one JSON object a line, with the job in whose reconcile it was written."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

from spotune_operator.observe.state import JobKey

_job: ContextVar[JobKey | None] = ContextVar("job", default=None)


@contextmanager
def log_context(key: JobKey) -> Iterator[None]:
    """Add namespace and name of this job to everything logged within the block."""
    token = _job.set(key)
    try:
        yield
    finally:
        _job.reset(token)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON: time, level, logger, message, and, if there are any, the job and the traceback."""
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        key = _job.get()
        if key is not None:
            content |= {"namespace": key[0], "job": key[1]}
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False)


def log_as_json(level: int = logging.INFO) -> None:
    """Log to standard error in this format, without kopf's own records about each event."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
