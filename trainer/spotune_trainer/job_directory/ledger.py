"""The ledger of a job: one JSON line for each event, appended on the head by the driver and the supervisor."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from spotune.retry import Failure, FailureCause
from spotune_trainer import files
from spotune_trainer.job_directory.events import EventReader
from spotune_trainer.job_directory.layout import JobDirectory

COUNTED_CAUSES = ("workerLost", "headLost", "preempted", "hang", "appError", "outOfMemory")
"""Causes with their own counter in `status.restarts`."""

_COUNTED_AS = {
    FailureCause.DATA: FailureCause.APP_ERROR,
    FailureCause.COMMUNICATION: FailureCause.WORKER_LOST,
    FailureCause.INFRASTRUCTURE: FailureCause.WORKER_LOST,
}


class Ledger:
    """Appends to the ledger of one job, and reads it."""

    def __init__(self, directory: JobDirectory) -> None:
        self._path = directory.ledger

    def append(self, event: str, **values: Any) -> None:
        """Append an event with the present time."""
        self.append_record({"time": time.time(), "event": event, **values})

    def append_record(self, record: dict[str, Any]) -> None:
        """Append an event that already has a time, such as one of a worker."""
        files.append_json(self._path, record)

    def records(self, *events: str) -> list[dict[str, Any]]:
        """All events of the given names in order; without names, all events.

        Raises:
            UnreadableFileError: the ledger was edited, or is damaged.
        """
        return [record for record in EventReader(self._path).read() if not events or record["event"] in events]

    def open_attempts(self) -> dict[int, bool]:
        """Attempts without a recorded exit, in order; the value is whether the attempt has trained the model."""
        with files.reading(self._path):
            ended = {record["attempt"] for record in self.records("attempt-ended")}
            finished = max((record["time"] for record in self.records("finished")), default=float("-inf"))
            return {
                record["attempt"]: record["time"] <= finished
                for record in self.records("attempt-started")
                if record["attempt"] not in ended
            }

    def failures(self) -> list[Failure]:
        """All failures, oldest first."""
        with files.reading(self._path):
            return [_failure(record) for record in self.records("failure")]

    def failures_since_change(self) -> list[Failure]:
        """Failures since the last change of the job: earlier ones no longer count, because the change may fix them.

        The order of the ledger decides, and not the times, since heads have clocks of their own.
        """
        found: list[Failure] = []
        with files.reading(self._path):
            for record in self.records("failure", "job-changed"):
                if record["event"] == "failure":
                    found.append(_failure(record))
                else:
                    found.clear()
        return found

    def restarts(self) -> dict[str, int]:
        """Number of failures by the causes of `status.restarts`."""
        counted = Counter(str(_COUNTED_AS.get(failure.cause, failure.cause)) for failure in self.failures())
        return {cause: counted[cause] for cause in COUNTED_CAUSES}

    def steps_lost(self) -> int:
        """Trained steps that were lost with their worker group, over all generations."""
        with files.reading(self._path):
            return sum(record["stepsLost"] for record in self.records("generation-started"))

    def workers_lost(self) -> int:
        """Number of failures in which a worker or the head was lost or preempted."""
        taken = {FailureCause.WORKER_LOST, FailureCause.HEAD_LOST, FailureCause.PREEMPTED}
        return sum(failure.cause in taken for failure in self.failures())

    def last_commit_seconds(self) -> float | None:
        """Seconds of the last commit until it was durable; None before the first commit."""
        commits = self.records("committed")
        with files.reading(self._path):
            return float(commits[-1]["seconds"]) if commits else None

    def replacement_seconds(self) -> list[float]:
        """Seconds from the loss or the notice of a worker until there were as many slots again, in order."""
        with files.reading(self._path):
            return [float(record["seconds"]) for record in self.records("replaced")]

    def worker_seconds(self) -> float:
        """Worker time in seconds: duration times world size, summed over all generations that have ended."""
        with files.reading(self._path):
            return float(sum(record["seconds"] * record["worldSize"] for record in self.records("generation-ended")))


def _failure(record: Mapping[str, Any]) -> Failure:
    return Failure(FailureCause(record["cause"]), record["step"], record["time"], record["message"])
