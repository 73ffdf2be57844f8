"""Coverage plugin: what a process has run is on the disk a moment later, so that one ended by SIGKILL still counts.

Ray ends its workers without a way for Python to say goodbye, and the tests kill processes on purpose: without this,
most of what the trainer does would count as never run. `make test` puts this folder on the PYTHONPATH of all it starts.
"""

import os
import sys
import threading
import time
from contextlib import nullcontext

import coverage
from coverage import inorout
from coverage.collector import Collector
from coverage.plugin_support import Plugins
from coverage.types import TConfigSectionOut

SECONDS_BETWEEN_FLUSHES = 0.25
MEASURED = ("spotune", "spotune_client", "spotune_operator", "spotune_serve", "spotune_trainer")


class _OneAtATime:
    """Writes of one process, in turn: a flush must not meet the save of a process that is leaving, nor a fork.

    A process that is forked during a flush would find coverage's own lock taken for ever.
    """

    def __init__(self) -> None:
        self._save = coverage.Coverage.save
        self._lock = threading.RLock()
        os.register_at_fork(
            before=lambda: self._lock.acquire(),
            after_in_parent=lambda: self._lock.release(),
            after_in_child=self._forget,
        )

    def save(self, measured: coverage.Coverage) -> None:
        with self._lock:
            self._save(measured)

    def flush(self, collector: Collector) -> None:
        """Write what was recorded, and no more."""
        with self._lock:
            collector.flush_data()

    def _forget(self) -> None:
        """In a forked process the lock is another one: which thread holds the old one there is nobody's to know."""
        self._lock = threading.RLock()


def _keep_what_was_written(_collector: Collector) -> None:
    """In place of coverage's clearing after a write: what ran while it was being written would go with it."""


def _flush_for_ever(turns: _OneAtATime) -> None:
    written = 0
    while True:
        time.sleep(SECONDS_BETWEEN_FLUSHES)
        current = coverage.Coverage.current()
        collector = current._collector if current is not None else None
        if collector is None or not any(package in sys.modules for package in MEASURED):
            continue
        recorded = sum(len(lines) for lines in collector.data.copy().values())
        if recorded > written:
            turns.flush(collector)
            written = recorded


def coverage_init(_plugins: Plugins, _options: TConfigSectionOut) -> None:
    """Start the flushing thread of this process; coverage calls it once it measures."""
    # When a thread meets a new file after `sys.path` has changed, coverage looks for our packages again, and afterwards
    # takes all modules out of `sys.modules` that came meanwhile, also those that another thread is importing.
    inorout.sys_modules_saved = nullcontext  # type: ignore[assignment, attr-defined]
    turns = _OneAtATime()
    coverage.Coverage.save = lambda measured: turns.save(measured)  # type: ignore[assignment, method-assign]
    Collector._clear_data = _keep_what_was_written  # type: ignore[assignment, method-assign]
    threading.Thread(target=_flush_for_ever, args=[turns], name="coverage-flush", daemon=True).start()
