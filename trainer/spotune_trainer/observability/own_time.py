"""How long a rank computes in a step, without the time in which it waits for other ranks in collectives.

The wall time of a step is the same on all ranks, because the slowest one holds up the others. What differs is where
they spend it: the slow rank computes (or waits for its data), the others wait in collectives. A rank's own time of a
step is therefore

    wait for the micro-batches + time from their arrival to the end of the step - waits in collectives

Collectives of torch.distributed, DeepSpeed's included, end with `Work.wait`, which this module times:

- gloo blocks the host there: the host's clock measures it.
- NCCL makes a stream of the device wait, and the host goes on. Two CUDA events around it measure how long the stream
  stood still. They are read a step later, after the host has waited for the device anyway, so nothing waits for them.

DeepSpeed reduces gradients on a stream of its own; where the computing stream waits for that one,
`stream_wait` is timed in the same way. The transfers are excluded with the waits: they take all ranks equally long.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from spotune.goodput import Part
from spotune_trainer.observability.stopwatch import Stopwatch

_HOST_WAITED_SECONDS = 0.0005
"""A wait that keeps the host for longer was one of the host, and not only of a stream."""


class CollectiveWaits:
    """Seconds that this process has spent in waits for collectives. One a process: see `collective_waits`.

    Only waits of the thread that calls `begin` count on the host: commits use collectives in other threads.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._thread: int | None = None
        self._host_seconds = 0.0
        self._device = deque[tuple[Any, Any]]()
        self._spare: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Count from now on, in this thread."""
        self._host_seconds, self._thread = 0.0, threading.get_ident()

    def end(self) -> float:
        """Seconds since `begin`, and those of earlier waits of streams that have ended by now; stops counting."""
        self._thread = None
        seconds, self._host_seconds = self._host_seconds, 0.0
        while self._device and self._device[0][1].query():
            events = self._device.popleft()
            seconds += events[0].elapsed_time(events[1]) / 1000
            self._spare.append(events)
        return seconds

    def timed(self, wait: Callable[[], Any]) -> Any:
        """Call a function that waits, and count how long it does."""
        if self._thread is None:
            return wait()
        events = self._begin_on_stream()
        started = self._clock()
        try:
            return wait()
        finally:
            waited = self._clock() - started
            if self._thread == threading.get_ident() and (events is None or waited >= _HOST_WAITED_SECONDS):
                self._host_seconds += waited
                if events is not None:
                    self._spare.append(events)
            elif events is not None:
                events[1].record()
                self._device.append(events)

    def _begin_on_stream(self) -> tuple[Any, Any] | None:
        """Two events of which the first is recorded; None if this is not a stream that computes."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            return None
        events = self._spare.pop() if self._spare else _new_events()
        events[0].record()
        return events


def _new_events() -> tuple[Any, Any]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return first, last


collective_waits = CollectiveWaits()
"""The waits of this process."""


def time_collectives() -> None:
    """Time all waits for collectives of this process from now on. A second call changes nothing."""
    original = distributed.Work.wait
    if getattr(original, "is_timed", False):
        return

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        return collective_waits.timed(lambda: original(self, *args, **kwargs))

    wait.is_timed = True  # type: ignore[attr-defined]
    distributed.Work.wait = wait  # type: ignore[method-assign]


def stream_wait(other: Any) -> None:
    """Let the current CUDA stream wait for another one, on which collectives run."""
    collective_waits.timed(lambda: torch.cuda.current_stream().wait_stream(other))


class OwnTime:
    """Measures this rank's own time of each step.

    Args:
        stopwatch: of the rank; knows how long it has waited for data.
        clock: seconds, monotonic.
    """

    def __init__(self, stopwatch: Stopwatch, clock: Callable[[], float] = time.perf_counter) -> None:
        self._stopwatch = stopwatch
        self._clock = clock
        self._began = 0.0
        self._data_wait = self._data_wait_so_far()
        time_collectives()

    def begin_step(self) -> None:
        """The micro-batches of the step have arrived."""
        self._began = self._clock()
        collective_waits.begin()

    def finish_step(self) -> float:
        """Own seconds of the step, its wait for data included; at least 0."""
        seconds = self._clock() - self._began - collective_waits.end()
        before, self._data_wait = self._data_wait, self._data_wait_so_far()
        return max(0.0, seconds + self._data_wait - before)

    def _data_wait_so_far(self) -> float:
        return self._stopwatch.seconds().get(Part.DATA_WAIT, 0.0)
