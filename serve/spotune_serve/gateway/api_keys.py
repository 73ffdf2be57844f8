"""The API keys in a file, which may change while the gateway runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from spotune.errors import JobError
from spotune_serve.gateway.settings import hash_key

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 5.0


class ApiKeyFile:
    """The valid keys: one per line of a file; blank lines are ignored.

    The kubelet replaces the file of a mounted Secret when the Secret changes, so the file is read again.

    Args:
        path: the file.
        check_seconds: minimum time between two reads.
        clock: returns monotonic seconds.

    Raises:
        JobError: the file cannot be read or has no key.
    """

    def __init__(
        self, path: Path, *, check_seconds: float = _CHECK_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._check_seconds = check_seconds
        self._clock = clock
        self._checked_at = clock()
        self._problem = ""
        try:
            self._digests = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(
                f"the file with API keys {path} cannot be read: {error}. Mount the Secret with the keys there."
            ) from error
        if not self._digests:
            raise JobError(f"the file with API keys {path} is empty. Write at least one key into it, one per line.")

    def digests(self) -> tuple[str, ...]:
        """The digests of the valid keys (`hash_key`). Empty: no key is valid, and no request is allowed.

        If the file cannot be read any more, the keys stay as they were.
        """
        now = self._clock()
        if now - self._checked_at >= self._check_seconds:
            self._checked_at = now
            self._read_again()
        return self._digests

    def _read_again(self) -> None:
        try:
            digests = self._read()
        except (OSError, UnicodeDecodeError) as error:
            self._report(f"the API keys stay as they are: the file {self._path} cannot be read: {error}")
            return
        self._report("" if digests else f"all requests are refused: the file with API keys {self._path} is empty")
        if digests != self._digests:
            logger.info("the API keys have changed: %d are valid", len(digests))
            self._digests = digests

    def _read(self) -> tuple[str, ...]:
        lines = self._path.read_text(encoding="utf-8").split("\n")
        return tuple(hash_key(line.strip()) for line in lines if line.strip())

    def _report(self, problem: str) -> None:
        """Log a problem once, and not at every read."""
        if problem and problem != self._problem:
            logger.error("%s", problem)
        self._problem = problem
