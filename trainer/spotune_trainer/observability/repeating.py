"""Repeat an action in a thread while something else runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(action: Callable[[], object], every_seconds: float, name: str) -> Iterator[None]:
    """Call an action every so many seconds while the body runs, in a thread with this name."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_seconds):
            action()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
