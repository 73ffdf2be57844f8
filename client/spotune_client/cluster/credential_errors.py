"""Errors of credential plugins: the Kubernetes library only logs them, and goes on with the old credentials."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged_errors() -> Iterator[list[str]]:
    """Collect the errors that this thread writes to the root logger, which the library uses."""
    found: list[str] = []
    thread = threading.get_ident()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread and record.name == logging.root.name:
                found.append(" ".join(record.getMessage().split()))

    collector = Collector(logging.ERROR)
    logging.root.addHandler(collector)
    try:
        yield found
    finally:
        logging.root.removeHandler(collector)
