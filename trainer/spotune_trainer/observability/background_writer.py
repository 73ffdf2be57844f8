"""Write small files from a thread, so that training does not wait for the volume.

While a volume takes a checkpoint's gigabytes, it may delay everything else, even the few hundred bytes of a heartbeat.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from spotune_trainer import files

logger = logging.getLogger("spotune.worker")

_BATCH_SECONDS = 0.1
"""Lines are collected for so long: a thread that wakes for each step takes the interpreter from training."""


class BackgroundWriter:
    """Appends lines to files in their order, and replaces one file by its newest content. Runs from `start` to `close`.

    If the volume refuses lines, they are kept and tried again with the next request.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[tuple[Path, dict[str, Any]]] = deque()
        self._lines_requested = self._lines_written = 0
        self._newest: tuple[Path, dict[str, Any]] | None = None
        self._requested = self._attempted = 0
        self._is_closing = self._is_idle = self._is_urgent = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def append(self, path: Path, record: dict[str, Any]) -> None:
        """Append a JSON line to a file, after all lines requested before; it is written within a tenth of a second."""
        with self._changed:
            self._lines.append((path, record))
            self._lines_requested += 1
            self._request(is_urgent=False)

    def replace(self, path: Path, value: dict[str, Any]) -> None:
        """Replace a file by JSON, without fsync. Skipped if the volume refuses it or a newer value follows first."""
        with self._changed:
            self._newest = path, value
            self._request(is_urgent=True)

    def flush(self) -> bool:
        """Wait until every earlier request has been attempted; returns whether all lines are written."""
        with self._changed:
            self._request(is_urgent=True)
            requested, lines = self._requested, self._lines_requested
            self._changed.wait_for(lambda: self._attempted >= requested or self._error is not None)
            self._raise_error()
            return self._lines_written >= lines

    def close(self) -> None:
        """Flush once more and stop the thread."""
        try:
            self.flush()
        finally:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._thread.join()

    def _request(self, *, is_urgent: bool) -> None:
        self._raise_error()
        self._requested += 1
        self._is_urgent |= is_urgent
        if self._is_idle or is_urgent:
            self._changed.notify_all()

    def _raise_error(self) -> None:
        """Raise an error of the thread: errors of the volume are retried, so this one is a bug of the caller."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._is_idle = True
                    self._changed.wait_for(lambda: self._requested > self._attempted or self._is_closing)
                    self._is_idle = False
                    self._changed.wait_for(lambda: self._is_urgent or self._is_closing, _BATCH_SECONDS)
                    if self._is_closing:
                        return
                    self._is_urgent = False
                    requested, lines = self._requested, self._lines_requested
                    newest, self._newest = self._newest, None
                self._write_lines(lines)
                if newest is not None:
                    with suppress(OSError):  # the volume may be full; the next value supersedes this one anyway
                        files.write_json(*newest, durable=False)
                with self._changed:
                    self._attempted = requested
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised at the caller's next request
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _write_lines(self, until: int) -> None:
        """Write the lines up to number `until`, but none requested later: a flush must not wait for those."""
        while self._lines_written < until:
            path, record = self._lines[0]
            try:
                files.append_json(path, record)
            except OSError as error:
                logger.warning("cannot write %s; will try again: %s", path.name, error)
                return
            self._lines.popleft()
            self._lines_written += 1
