"""Send curves to a tracking server from a background thread, which neither training nor its status waits for.

On connecting, the thread asks the server for the last step that it has, and sends the surviving steps after it. So the
run there has every step once, whatever happens to drivers, worker groups and the network. A step that was lost and
repeated is not sent again.
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
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.tracking.tracker import evaluation_point, harness_point, samples_of, step_point

logger = logging.getLogger("spotune.tracking")

Kind = Literal["step", "evalStep", "harnessStep"]
"""Kind of a point, and the name of the curve that holds its step numbers on the server."""
KINDS: tuple[Kind, ...] = ("step", "evalStep", "harnessStep")

_SEND_EVERY_SECONDS = 5.0
_MAX_BATCH_POINTS = 100
_BACKOFF_SECONDS = (5.0, 300.0)
_FINAL_TIMEOUT_SECONDS = 60.0
"""How long the end of a run waits for the server to accept the remaining points."""
_RESTART_TIMEOUT_SECONDS = 3.0
"""How long a driver waits if another one will follow: that one sends the missing points."""


@dataclass(frozen=True)
class Point:
    """The values of curves at a step; for an evaluation, its generated answers too (`samples_of`)."""

    kind: Kind
    step: int
    values: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of_step(cls, record: Mapping[str, Any]) -> Point:
        """The point of a line of `steps.jsonl`."""
        return cls("step", record["step"], step_point(record))

    @classmethod
    def of_evaluation(cls, record: Mapping[str, Any]) -> Point:
        """The point of an `evaluated` event."""
        return cls("evalStep", record["step"], evaluation_point(record), samples_of(record))

    @classmethod
    def of_harness(cls, record: Mapping[str, Any]) -> Point:
        """The point of a `harness` event."""
        return cls("harnessStep", record["step"], harness_point(record))


class Service(Protocol):
    """A connection to a tracking server for one run. Any method may raise any exception of its client library."""

    def last_step(self, kind: Kind) -> int:
        """The last step for which the server has a point of this kind; 0 if there is none."""

    def log(self, points: Sequence[Point]) -> None:
        """Send points; each also logs its step number as the curve named by its `kind`."""

    def close(self, phase: Phase) -> None:
        """Set the status of the run and disconnect."""


def run_history(directory: JobDirectory) -> Iterable[Point]:
    """All points of a run so far, from the files of its directory."""
    yield from map(Point.of_step, steps_after(directory, 0))
    ledger = Ledger(directory)
    yield from map(Point.of_evaluation, ledger.records("evaluated"))
    yield from map(Point.of_harness, ledger.records("harness"))


class RemoteTracker:
    """Keeps the run on one tracking server up to date.

    Args:
        name: name of the service, for log messages.
        connect: opens a connection.
        read_history: returns all points of the run so far; called after each new connection.
        send_every_seconds: pause between two batches.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Service],
        read_history: Callable[[], Iterable[Point]],
        send_every_seconds: float = _SEND_EVERY_SECONDS,
    ) -> None:
        self._name = name
        self._connect = connect
        self._read_history = read_history
        self._pause = send_every_seconds
        self._new_points: deque[Point] = deque()
        self._closing = threading.Event()
        self._phase = Phase.PREPARING
        self._thread = threading.Thread(target=self._run, name=f"tracking-{name}", daemon=True)

    def rewind(self, step: int) -> None:
        """Start the thread. Nothing is discarded: the server already has the lost steps, which will be repeated."""
        if not self._thread.ident:
            self._thread.start()

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Queue a step."""
        self._new_points.append(Point.of_step(record))

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        """Queue an evaluation."""
        self._new_points.append(Point.of_evaluation(record))

    def log_harness(self, record: Mapping[str, Any]) -> None:
        """Queue the scores of lm-evaluation-harness."""
        self._new_points.append(Point.of_harness(record))

    def close(self, phase: Phase) -> None:
        """Wait a limited time for the server to accept the remaining points."""
        self._phase = phase
        self._closing.set()
        if self._thread.ident:
            is_final = phase in (Phase.DONE, Phase.FAILED)
            timeout = _FINAL_TIMEOUT_SECONDS if is_final else _RESTART_TIMEOUT_SECONDS
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("%s did not accept the last points within %.0f s", self._name, timeout)

    def _run(self) -> None:
        failures = 0
        while True:
            try:
                self._send_points(self._connect())
            except Exception as error:  # noqa: BLE001 - no failure of a tracking server may stop training
                failures += 1
                backoff = backoff_seconds(failures, *_BACKOFF_SECONDS)
                logger.warning("%s: %s: %s; retrying in %.0f s", self._name, type(error).__name__, error, backoff)
                if self._closing.wait(backoff):
                    return
            else:
                return

    def _send_points(self, service: Service) -> None:
        """Send the points that the server does not have, until `close` is called."""
        last = {kind: service.last_step(kind) for kind in KINDS}
        points = list(self._read_history())
        while True:
            is_last = self._closing.is_set()
            while self._new_points:
                points.append(self._new_points.popleft())
            missing = [point for point in points if point.step > last[point.kind]]
            for start in range(0, len(missing), _MAX_BATCH_POINTS):
                if batch := _without_repeated(missing[start : start + _MAX_BATCH_POINTS], last):
                    service.log(batch)
            points = []
            if is_last:
                service.close(self._phase)
                return
            self._closing.wait(self._pause)


def _without_repeated(points: Iterable[Point], last: dict[Kind, int]) -> list[Point]:
    """The points whose step exceeds the last one of their kind. Updates `last`."""
    new = []
    for point in points:
        if point.step > last[point.kind]:
            last[point.kind] = point.step
            new.append(point)
    return new
