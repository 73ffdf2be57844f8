"""Runs blocking iterators for asynchronous callers, in threads that end when the caller stops iterating."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Final, TypeVar

from spotune_client.waiting import Pause

T = TypeVar("T")
_NOTHING_LEFT: Final = object()


class StoppedError(Exception):
    """The caller has stopped; only raised inside a pause, in the thread that pauses."""


def stoppable_pause(stopped: threading.Event) -> Pause:
    """A pause that raises ``StoppedError`` as soon as the event is set."""

    def pause(seconds: float) -> None:
        if stopped.wait(seconds):
            raise StoppedError

    return pause


async def call(work: Callable[[Pause], T]) -> T:
    """Run blocking work in a thread. If the caller is cancelled, the work ends at its next pause."""
    stopped = threading.Event()
    try:
        return await asyncio.to_thread(work, stoppable_pause(stopped))
    finally:
        stopped.set()


async def iterate(start: Callable[[Pause], Iterator[T]]) -> AsyncGenerator[T, None]:
    """Yield the items of a blocking iterator, each fetched in a thread.

    Args:
        start: Creates the iterator. It has to use the given pause, so that it ends when the caller stops.
    """
    stopped, lock = threading.Event(), threading.Lock()
    iterator = start(stoppable_pause(stopped))

    def fetch() -> object:
        with lock:
            return next(iterator, _NOTHING_LEFT)

    def close() -> None:
        with lock:  # a generator cannot be closed while it runs
            getattr(iterator, "close", lambda: None)()

    try:
        while (item := await asyncio.to_thread(fetch)) is not _NOTHING_LEFT:
            yield item  # type: ignore[misc] # not _NOTHING_LEFT, so it is a T
    finally:
        stopped.set()
        await asyncio.shield(asyncio.to_thread(close))
