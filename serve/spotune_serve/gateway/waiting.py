"""Requests that wait for their first token, until it turns out that none will come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager


class Waiters:
    """The waiting requests of one version.

    Args:
        gone: makes the error that ends a wait.
    """

    def __init__(self, gone: Callable[[], Exception]) -> None:
        self._gone = gone
        self._waits: set[asyncio.Timeout] = set()

    def __len__(self) -> int:
        return len(self._waits)

    @asynccontextmanager
    async def wait(self) -> AsyncGenerator[None, None]:
        """The request of this task waits. `abandon` ends it with the error."""
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            if wait.expired():
                raise self._gone() from error
            raise

    def abandon(self) -> None:
        """End all waits."""
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)
