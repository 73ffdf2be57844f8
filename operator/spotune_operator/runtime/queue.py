"""A work queue: each key is queued once, is worked on by one task at a time, and is retried with backoff.

The same guarantees as client-go's rate-limiting work queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Timer(Protocol):
    """The handle that ``loop.call_later`` returns."""

    def cancel(self) -> None:
        """Cancel the call."""

    def when(self) -> float:
        """Time of the call, on the clock of the event loop."""


_MAX_DOUBLINGS = 32
CallLater = Callable[[float, Callable[[], None]], Timer]


class WorkQueue(Generic[Key]):
    """Keys to work on. A key that is added while it is worked on is queued again afterwards.

    Args:
        first_wait: Seconds before the first retry; each further failure doubles them.
        longest_wait: Maximum seconds before a retry.
        call_later: The event loop's, unless a test injects its own.
    """

    def __init__(self, first_wait: float, longest_wait: float, call_later: CallLater | None = None) -> None:
        self._first_wait = first_wait
        self._longest_wait = longest_wait
        self._call_later = call_later or (lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call))
        self._ready: deque[Key] = deque()
        self._waiting: dict[Key, Timer] = {}
        self._queued: set[Key] = set()
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: Key, after_seconds: float = 0.0) -> None:
        """Queue a key after a delay; an earlier time that is already scheduled stays."""
        timer = self._call_later(after_seconds, lambda: self._is_due(key))
        earlier = self._waiting.get(key)
        if earlier is not None and earlier.when() <= timer.when():
            timer.cancel()
            return
        if earlier is not None:
            earlier.cancel()
        self._waiting[key] = timer

    async def get(self) -> Key:
        """Wait for the next key. The caller must call ``done`` or ``failed`` afterwards."""
        while not self._ready:
            self._filled.clear()
            await self._filled.wait()
        key = self._ready.popleft()
        self._queued.discard(key)
        self._working.add(key)
        return key

    def done(self, key: Key) -> None:
        """The work on a key succeeded: reset its backoff."""
        self._failures.pop(key, None)
        self._finish(key)

    def failed(self, key: Key) -> float:
        """The work on a key failed: retry it.

        Returns:
            Seconds until the retry.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait = min(self._first_wait * 2.0 ** min(failures, _MAX_DOUBLINGS), self._longest_wait)
        self._finish(key)
        self.add(key, wait)
        return wait

    def _finish(self, key: Key) -> None:
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._put(key)

    def _is_due(self, key: Key) -> None:
        self._waiting.pop(key, None)
        if key in self._working:
            self._again.add(key)
        else:
            self._put(key)

    def _put(self, key: Key) -> None:
        if key not in self._queued:
            self._queued.add(key)
            self._ready.append(key)
            self._filled.set()
