"""Measure where a worker's time goes: one `Part` at any moment, so the parts sum to the time since the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from spotune.goodput import Part

T = TypeVar("T")


class Stopwatch:
    """Seconds by part since it was created. It starts with `Part.STARTUP`, and is not thread-safe.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds = dict.fromkeys(Part, 0.0)
        self._last_lap = dict.fromkeys(Part, 0.0)
        self.part = Part.STARTUP

    def seconds(self) -> dict[Part, float]:
        """Seconds of each part so far, the current one included; parts without any time are left out."""
        self._switch(self.part)
        return {part: seconds for part, seconds in self._seconds.items() if seconds}

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Count the time of this context as `part`; afterwards the previous part continues."""
        previous = self.part
        self._switch(part)
        try:
            yield
        finally:
            self._switch(previous)

    def measure_each(self, part: Part, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; the time until each of them is available counts as `part`."""
        iterator = iter(items)
        while True:
            with self.measure(part):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def lap(self, part: Part) -> float:
        """Seconds of a part since the last call for it."""
        total = self.seconds().get(part, 0.0)
        seconds, self._last_lap[part] = total - self._last_lap[part], total
        return seconds

    def continue_from(self, seconds: Mapping[Part, float]) -> None:
        """Replace what was measured so far by what another stopwatch has measured meanwhile."""
        self._seconds = dict.fromkeys(Part, 0.0) | dict(seconds)
        self._since = self._clock()

    def _switch(self, part: Part) -> None:
        now = self._clock()
        self._seconds[self.part] += now - self._since
        self._since, self.part = now, part
