"""What a worker's time is spent on: exactly one part at any moment, so the parts sum to the time since its start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from spotune.goodput import Part

T = TypeVar("T")


class Stopwatch:
    """Seconds by part, since it was made; for one thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds = dict.fromkeys(Part, 0.0)
        self._lap = 0.0
        self.part = Part.STARTUP

    def seconds(self) -> dict[Part, float]:
        """What each part took so far, the one that goes on included."""
        self._switch(self.part)
        return {part: seconds for part, seconds in self._seconds.items() if seconds}

    @contextmanager
    def on(self, part: Part) -> Iterator[None]:
        """Spend the time of this context on `part`, and then on what it was spent on before."""
        before = self.part
        self._switch(part)
        try:
            yield
        finally:
            self._switch(before)

    def each(self, part: Part, items: Iterable[T]) -> Iterator[T]:
        """The items, with the time that they take to come spent on `part`."""
        iterator = iter(items)
        while True:
            with self.on(part):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def lap(self) -> float:
        """Productive seconds since the last call."""
        productive = self.seconds().get(Part.PRODUCTIVE, 0.0)
        seconds, self._lap = productive - self._lap, productive
        return seconds

    def _switch(self, part: Part) -> None:
        now = self._clock()
        self._seconds[self.part] += now - self._since
        self._since, self.part = now, part
