"""Small files of a job's volume, written by a thread, so that training does not wait for the volume.

A disk that takes a checkpoint's gigabytes may keep everybody else waiting, even for the few hundred bytes of a
heartbeat.
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


class BackgroundWriter:
    """Appends lines in their order, and replaces one file by its newest content; from `start` to `close`.

    Lines that the volume does not take are kept and tried again with whatever is asked for next.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[tuple[Path, dict[str, Any]]] = deque()
        self._lines_asked = self._lines_written = 0
        self._newest: tuple[Path, dict[str, Any]] | None = None
        self._asked = self._tried = 0
        self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def append(self, path: Path, record: dict[str, Any]) -> None:
        """Append a line to a file, after those before it."""
        with self._changed:
            self._lines.append((path, record))
            self._lines_asked += 1
            self._ask()

    def replace(self, path: Path, value: dict[str, Any]) -> None:
        """Replace a file by JSON; not durable, and left out where it does not fit or a newer one follows at once."""
        with self._changed:
            self._newest = path, value
            self._ask()

    def flush(self) -> bool:
        """Wait until the volume was asked to take all that was said before; whether it has all the lines."""
        with self._changed:
            self._ask()
            asked, lines = self._asked, self._lines_asked
            self._changed.wait_for(lambda: self._tried >= asked or self._error is not None)
            self._raise()
            return self._lines_written >= lines

    def close(self) -> None:
        """Try once more, and end the thread."""
        try:
            self.flush()
        finally:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._thread.join()

    def _ask(self) -> None:
        self._raise()
        self._asked += 1
        self._changed.notify_all()

    def _raise(self) -> None:
        """An error that is not the volume's is a mistake of whoever asked."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._asked > self._tried or self._is_closing)
                    if self._is_closing:
                        return
                    asked, lines = self._asked, self._lines_asked
                    newest, self._newest = self._newest, None
                self._write_lines(lines)
                if newest is not None:
                    with suppress(OSError):  # a volume that is full now may be grown: the next one says it all
                        files.write_json(*newest, durable=False)
                with self._changed:
                    self._tried = asked
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks next
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _write_lines(self, until: int) -> None:
        """Write the lines up to this number, and none that came later: whoever flushes does not wait for those."""
        while self._lines_written < until:
            path, record = self._lines[0]
            try:
                files.append_json(path, record)
            except OSError as error:
                logger.warning("%s cannot be written, and will be: %s", path.name, error)
                return
            self._lines.popleft()
            self._lines_written += 1
