"""Tracking servers: the same curves, in a thread of their own that neither training nor its status waits for.

A server is asked for the last step that it has, and is given the surviving steps after it. So one run there has every
step once, whatever became of drivers, worker groups and the network meanwhile. A step that was lost and made again is
not sent again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from spotune.retry import backoff_seconds
from spotune_trainer.checkpoint.generations import steps_after
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.progress import Phase
from spotune_trainer.observability.tracking.tracker import evaluation_point, step_point

logger = logging.getLogger("spotune.tracking")

Kind = Literal["step", "evalStep"]
"""Of a point: the name of the curve that says how far a server is."""
KINDS: tuple[Kind, ...] = ("step", "evalStep")

_SEND_EVERY_SECONDS = 5.0
_MOST_AT_ONCE = 100
_BACKOFF_SECONDS = (5.0, 300.0)
_LAST_SECONDS = 60.0
"""That the end of a run waits for a server to take the rest."""
_STOP_SECONDS = 3.0
"""That a driver waits which another one will follow, and send what is missing."""


@dataclass(frozen=True)
class Point:
    """Values by curve at a step."""

    kind: Kind
    step: int
    values: Mapping[str, float]

    @classmethod
    def of_step(cls, record: Mapping[str, Any]) -> Point:
        """Of a line of `steps.jsonl`."""
        return cls("step", record["step"], step_point(record))

    @classmethod
    def of_evaluation(cls, record: Mapping[str, Any]) -> Point:
        """Of an `evaluated` event."""
        return cls("evalStep", record["step"], evaluation_point(record))


class Service(Protocol):
    """A connection to a server, for one run. Every method may raise whatever its client raises."""

    def last_step(self, kind: Kind) -> int:
        """The last step that the run there has a point of this kind for, 0 where there is none."""

    def log(self, points: Sequence[Point]) -> None:
        """Send points, each with its step as the value of its `kind`."""

    def close(self, phase: Phase) -> None:
        """Say how the run stands, and leave."""


def history(directory: JobDirectory) -> Iterable[Point]:
    """All points of a run until now, by its files."""
    yield from map(Point.of_step, steps_after(directory, 0))
    yield from map(Point.of_evaluation, Ledger(directory).records("evaluated"))


class RemoteTracker:
    """Keeps one run of a server up to date.

    Args:
        name: of the service, for people.
        connect: opens a connection.
        earlier: points of the run until now; asked for with every new connection.
        send_every_seconds: pause between two looks at what is new.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Service],
        earlier: Callable[[], Iterable[Point]],
        send_every_seconds: float = _SEND_EVERY_SECONDS,
    ) -> None:
        self._name = name
        self._connect = connect
        self._earlier = earlier
        self._pause = send_every_seconds
        self._news: deque[Point] = deque()
        self._ending = threading.Event()
        self._phase = Phase.PREPARING
        self._thread = threading.Thread(target=self._run, name=f"tracking-{name}", daemon=True)

    def rewind(self, step: int) -> None:
        """Begin; what came after `step` and is lost is made again, and known already."""
        if not self._thread.ident:
            self._thread.start()

    def step(self, record: Mapping[str, Any]) -> None:
        """Note a step, to be sent."""
        self._news.append(Point.of_step(record))

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Note an evaluation, to be sent."""
        self._news.append(Point.of_evaluation(record))

    def close(self, phase: Phase) -> None:
        """Give the server a while to take the rest."""
        self._phase = phase
        self._ending.set()
        if self._thread.ident:
            seconds = _LAST_SECONDS if phase in (Phase.DONE, Phase.FAILED) else _STOP_SECONDS
            self._thread.join(seconds)
            if self._thread.is_alive():
                logger.warning("%s did not take the last points within %.0f s", self._name, seconds)

    def _run(self) -> None:
        failures = 0
        while True:
            try:
                self._feed(self._connect())
            except Exception as error:  # noqa: BLE001 - whatever a tracking server does, training goes on
                failures += 1
                backoff = backoff_seconds(failures, *_BACKOFF_SECONDS)
                logger.warning("%s: %s: %s; trying again in %.0f s", self._name, type(error).__name__, error, backoff)
                if self._ending.wait(backoff):
                    return
            else:
                return

    def _feed(self, service: Service) -> None:
        """Send what the server lacks, until the end."""
        last = {kind: service.last_step(kind) for kind in KINDS}
        points = list(self._earlier())
        while True:
            is_last = self._ending.is_set()
            while self._news:
                points.append(self._news.popleft())
            lacking = [each for each in points if each.step > last[each.kind]]
            for start in range(0, len(lacking), _MOST_AT_ONCE):
                if chunk := _each_once(lacking[start : start + _MOST_AT_ONCE], last):
                    service.log(chunk)
            points = []
            if is_last:
                service.close(self._phase)
                return
            self._ending.wait(self._pause)


def _each_once(points: Iterable[Point], last: dict[Kind, int]) -> list[Point]:
    """Points beyond the last of their kind, which they become."""
    found = []
    for each in points:
        if each.step > last[each.kind]:
            last[each.kind] = each.step
            found.append(each)
    return found
