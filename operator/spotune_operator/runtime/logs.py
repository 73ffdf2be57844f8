"""The operator's log: a JSON object a line, with the job that it is about."""

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
def about(key: JobKey) -> Iterator[None]:
    """What is logged within is about this job."""
    token = _job.set(key)
    try:
        yield
    finally:
        _job.reset(token)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message; the job and the traceback where there is one."""
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
    """Have everything logged to standard error in this form; kopf's own remarks on each event are left out."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
