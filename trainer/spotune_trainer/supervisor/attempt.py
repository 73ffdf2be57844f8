"""One attempt as Ray sees it, however Ray fares: silent, slow, or gone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError, RayJob


@dataclass(frozen=True)
class Timing:
    """How long things may take, in seconds.

    Attributes:
        poll: between two looks at the driver.
        hang_margin: on top of `retry.hangTimeout`, within which the workers notice a hang by themselves.
        notice: that workers get to commit and leave when the supervisor is told to stop.
        end: that a driver gets to end when Ray was asked to end it.
        silence: of a Jobs API whose processes are alive, after which they count as lost.
    """

    poll: float = 0.5
    hang_margin: float = 60.0
    notice: float = 60.0
    end: float = 20.0
    silence: float = 120.0


class RayHead(Protocol):
    """The Ray that drivers run in."""

    def find(self, record: Mapping[str, Any] | None) -> bool:
        """Take over what `record` of an earlier supervisor describes; False where that is gone."""

    def start(self) -> None:
        """Have a Ray that runs."""

    def is_alive(self) -> bool:
        """Whether it runs; cheap."""

    def client(self) -> JobsClient:
        """A client of its Jobs API."""

    def record(self) -> dict[str, Any] | None:
        """What `find` needs."""

    def end(self) -> None:
        """Give it up, with all that runs in it."""


@dataclass(frozen=True)
class Attempt:
    """One driver: its number, counted over the life of the job directory, and its id in Ray."""

    number: int
    submission_id: str


class WatchedAttempt:
    """Asks Ray how one attempt is, and ends it."""

    def __init__(self, head: RayHead, attempt: Attempt, timing: Timing) -> None:
        self._head = head
        self._id = attempt.submission_id
        self._timing = timing
        self._client = head.client()
        self._answered = time.monotonic()
        self._last = RayJob(self._id, "PENDING", None, "", {})
        self._end_asked: float | None = None

    def look(self) -> RayJob | None:
        """The attempt as Ray knows it; None where it is lost. While Ray is silent, as it was."""
        now = time.monotonic()
        overdue = self._end_asked is not None and now - self._end_asked > self._timing.end
        if overdue or now - self._answered > self._timing.silence:
            self._head.end()
        if not self._head.is_alive():
            return None
        try:
            job = self._client.find(self._id)
        except JobsUnavailableError:
            return self._last if self._head.is_alive() else None
        self._answered = time.monotonic()
        if job is not None:
            self._last = job
        return job

    def end(self) -> None:
        """Ask Ray, once, to end the attempt; if that takes too long `look` gives up the whole Ray."""
        if self._end_asked is not None:
            return
        self._end_asked = time.monotonic()
        try:
            self._client.stop(self._id)
        except JobsUnavailableError:
            self._head.end()
