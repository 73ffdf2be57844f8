"""How long replacements of lost workers take to come, measured by counting slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass
class _MissingWorker:
    """A worker without a slot.

    Attributes:
        since: when its slot was lost or announced to be; None: before the first count.
        appeared: when a node with a slot for it appeared; None: there is none yet.
    """

    since: float | None
    appeared: float | None = None


class ReplacementTimes:
    """Measures how long it takes until there are as many slots again as before a loss or the notice of one.

    Slots are indistinguishable, so a slot that comes is for the worker that was lost last: it restores the number of
    slots before that loss. Workers that are missing at the first count are not measured: they may have been missing for
    any time. Nor are those that are no longer desired.

    Args:
        replaced: seconds that earlier replacements took, from the ledger.
        on_replaced: called for each replacement with its seconds (None: it is not measured when its worker was lost),
            and with those since its node appeared (None: it was ready when it was first counted).
    """

    def __init__(
        self,
        replaced: Iterable[float] = (),
        on_replaced: Callable[[float | None, float | None], object] = lambda _seconds, _start_seconds: None,
    ) -> None:
        self._seconds = list(replaced)
        self._start_seconds: list[float] = []
        self._on_replaced = on_replaced
        self._missing: list[_MissingWorker] = []  # the one that was lost last is the last
        self._desired: int | None = None

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each replacement, in order."""
        return tuple(self._seconds)

    def observe(self, *, nodes: int, ready: int, desired: int, now: float) -> None:
        """Count the slots; call it often.

        Args:
            nodes: slots of nodes that are alive and are to remain.
            ready: of these, slots that can train.
            desired: number of workers of the job.
            now: seconds, monotonic.
        """
        lacking, not_ready = max(0, desired - nodes), max(0, desired - ready)
        before, self._desired = self._desired, desired
        if before is None:
            self._missing = [_MissingWorker(None) for _ in range(lacking)]
        elif desired < before:
            del self._missing[: before - desired]
        elif lacking > 0:
            self._missing[:0] = [_MissingWorker(now) for _ in range(min(lacking, desired - before))]
        while len(self._missing) < lacking:
            self._missing.append(_MissingWorker(now))
        while len(self._missing) > not_ready:
            self._record(self._missing.pop(), now)
        for worker in self._missing[:lacking]:
            worker.appeared = None
        for worker in self._missing[lacking:]:
            worker.appeared = now if worker.appeared is None else worker.appeared

    def arrivals(self, number: int, now: float) -> tuple[float, ...]:
        """Seconds from now until so many more slots are ready, one estimate for each earlier replacement.

        Earlier replacements that took less time than this one has been missing for are left out. If it has been missing
        for longer than all of them took, it is expected to take as long again. Empty if no replacement was measured.

        Args:
            number: at least 1.
            now: seconds, monotonic.
        """
        worker = self._missing[-number] if number <= len(self._missing) else _MissingWorker(now)
        if worker.appeared is not None and self._start_seconds:
            return _remaining(self._start_seconds, now - worker.appeared)
        return _remaining(self._seconds, now - worker.since) if worker.since is not None else ()

    def missing(self) -> int:
        """Number of workers without a slot that is ready."""
        return len(self._missing)

    def _record(self, worker: _MissingWorker, now: float) -> None:
        seconds = now - worker.since if worker.since is not None else None
        start_seconds = now - worker.appeared if worker.appeared is not None else None
        if seconds is not None:
            self._seconds.append(seconds)
        if start_seconds is not None:
            self._start_seconds.append(start_seconds)
        if seconds is not None or start_seconds is not None:
            self._on_replaced(seconds, start_seconds)


def _remaining(measured: Iterable[float], elapsed: float) -> tuple[float, ...]:
    """What remains of durations of which so much has elapsed; see `ReplacementTimes.arrivals`."""
    durations = list(measured)
    longer = tuple(seconds - elapsed for seconds in durations if seconds > elapsed)
    return longer or ((elapsed,) if durations else ())
