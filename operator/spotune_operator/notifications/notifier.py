"""Sends notifications in tasks of their own: a reconcile only puts a change into a queue and never waits.

Each target has a queue and a task, so one that is down does not delay the others. A change is sent until the target
accepts it, in order. The queue is in memory: what it holds is lost if the operator is killed
(docs/adr/0080-notifications-in-memory.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Final, Literal, Protocol, Self

import aiohttp

from spotune.units.timestamps import rfc3339
from spotune_operator.kube.digest import digest
from spotune_operator.kube.phase_change import PhaseChange
from spotune_operator.notifications.targets import Target

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 3.0
"""The operator's pod has 10 s to end."""
Result = Literal["sent", "retried", "dropped"]


class Count(Protocol):
    """Counts a result."""

    def __call__(self, result: Result, number: int = 1) -> None:
        """Add a number to a result."""


@dataclass(frozen=True)
class Limits:
    """How often, how long and how many.

    Attributes:
        first_wait: Seconds after the first failure; they double at each further one.
        longest_wait: Maximum seconds between two attempts.
        max_age: Seconds after which a change is dropped. An hour covers an upgrade of the receiver.
        capacity: Changes that wait for a target; at more the oldest is dropped.
        per_minute: Requests a minute to a target. Slack allows one a second.
        burst: Requests that may follow each other at once.
    """

    first_wait: float = 1.0
    longest_wait: float = 60.0
    max_age: float = 3600.0
    capacity: int = 1000
    per_minute: float = 60.0
    burst: int = 10


@dataclass(frozen=True)
class _Entry:
    change: PhaseChange
    time: float

    @property
    def identity(self) -> str:
        return digest([self.change.uid, self.change.version, self.change.phase])


class _RetryError(Exception):
    """The target may accept the same request later.

    Args:
        message: Why.
        after: Seconds that the target asks to wait; 0: it does not say.
    """

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class _RefusedError(Exception):
    """The target will not accept this request."""


@dataclass
class _Queue:
    """The changes that wait for a target."""

    target: Target
    entries: deque[_Entry] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    emptied: asyncio.Event = field(default_factory=asyncio.Event)


class Notifier:
    """Sends changes of phases to targets; an asynchronous context manager.

    Args:
        targets: The targets.
        count: Counts results, for metrics.
        limits: How often, how long and how many.
        clock: Returns Unix time.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        count: Count,
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._queues = [_Queue(target) for target in targets]
        self._count = count
        self._limits = limits
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        if self._queues:
            # Redirects are not followed: they could lead to an address inside the cluster.
            timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
            self._session = aiohttp.ClientSession(timeout=timeout, headers={"User-Agent": "spotune-operator"})
            self._tasks = [asyncio.create_task(self._run(queue)) for queue in self._queues]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*(queue.emptied.wait() for queue in self._queues))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for queue in self._queues:
            if queue.entries:
                self._drop(queue, len(queue.entries), "the operator ends")
        if self._session is not None:
            await self._session.close()

    def phase_changed(self, change: PhaseChange) -> None:
        """Put a change into the queues of the targets that want it, and return at once."""
        for queue in self._queues:
            if not queue.target.wants(change):
                continue
            queue.entries.append(_Entry(change, self._clock()))
            queue.filled.set()
            queue.emptied.clear()
            if len(queue.entries) > self._limits.capacity:
                queue.entries.popleft()
                self._drop(queue, 1, f"more than {self._limits.capacity} wait")

    async def _run(self, queue: _Queue) -> None:
        """Send what is in a queue, until cancelled."""
        tokens, refilled = float(self._limits.burst), time.monotonic()
        wait = self._limits.first_wait
        while True:
            queue.filled.clear()
            if not queue.entries:
                queue.emptied.set()
                await queue.filled.wait()
            now = time.monotonic()
            tokens = min(self._limits.burst, tokens + (now - refilled) * self._limits.per_minute / 60)
            refilled = now
            if tokens < 1:
                await asyncio.sleep((1 - tokens) * 60 / self._limits.per_minute)
                continue
            tokens -= 1
            wait = await self._send_first(queue, wait)

    async def _send_first(self, queue: _Queue, wait: float) -> float:
        """Send the oldest change of a queue; returns how long to wait if the next attempt fails."""
        entry = queue.entries[0]
        try:
            await self._post(queue.target, entry)
        except _RetryError as error:
            if self._clock() - entry.time >= self._limits.max_age:
                self._remove(queue, entry)
                self._drop(queue, 1, str(error))
                return self._limits.first_wait
            self._count("retried")
            pause = min(max(wait, error.after), self._limits.longest_wait)
            logger.warning("notification to %s failed, next attempt in %.0f s: %s", queue.target.name, pause, error)
            await asyncio.sleep(pause)
            return min(2 * wait, self._limits.longest_wait)
        except _RefusedError as error:
            self._remove(queue, entry)
            self._drop(queue, 1, str(error))
        else:
            self._remove(queue, entry)
            self._count("sent")
        return self._limits.first_wait

    async def _post(self, target: Target, entry: _Entry) -> None:
        """Send one change.

        Raises:
            _RetryError: The target does not answer, or may accept it later.
            _RefusedError: The target will not accept it.
        """
        assert self._session is not None, "tasks run within the context"
        try:
            url = target.url_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise _RetryError(f"its Secret or key does not exist ({type(error).__name__})") from error
        body = target.body(entry.change, entry.identity, rfc3339(entry.time))
        try:
            async with self._session.post(url, json=body, allow_redirects=False) as response:
                status, after = response.status, response.headers.get("Retry-After", "")
        except aiohttp.InvalidURL as error:
            raise _RefusedError("the Secret has no valid URL") from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _RetryError(type(error).__name__) from error  # the message of the error has the URL
        if status < HTTPStatus.MULTIPLE_CHOICES:
            return
        if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500:
            raise _RetryError(f"HTTP {status}", float(after) if after.isdecimal() else 0.0)
        raise _RefusedError(f"HTTP {status}")

    @staticmethod
    def _remove(queue: _Queue, entry: _Entry) -> None:
        """Remove a change, unless it was dropped meanwhile because too many wait."""
        if queue.entries and queue.entries[0] is entry:
            queue.entries.popleft()

    def _drop(self, queue: _Queue, number: int, reason: str) -> None:
        self._count("dropped", number)
        logger.error("%d notification(s) to %s dropped: %s", number, queue.target.name, reason)
