"""Workers that have outlived their driver: what they report, until the next driver reads it.

Ranks need neither driver nor head, and write their progress to the volume themselves. While no driver reads it, the
supervisor does, so that nobody is told of an interruption that there is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spotune.job.status import max_silence
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.progress import status_fields

WORKERS_TRAIN_ON = "the head is being replaced; the workers train on"


@dataclass(frozen=True)
class _Heartbeat:
    """A heartbeat that was read: of which generation, since when it has been the same, whether it was another before.

    Only heartbeats since the loss of the driver count.
    """

    generation: int
    number: int
    since: float
    has_changed: bool


def _reached(progress: dict[str, Any]) -> dict[str, Any]:
    """Where workers were, alive or not. An earlier supervisor may have shown it, and a status must not go back."""
    return {name: progress[name] for name in ("step", "epoch", "loss") if name in progress}


class SurvivingWorkers:
    """Adds to a status what the workers report that no driver knows.

    They may have been lost together with their driver. So they count as alive from the first change of their heartbeat
    after its loss, and only while it goes on changing.

    Args:
        directory: of the job.
        clock: seconds, monotonic.
    """

    def __init__(self, directory: JobDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._created = clock()
        self._last: _Heartbeat | None = None

    def shown(self, status: dict[str, Any], age_seconds: float) -> dict[str, Any]:
        """A status, with the progress of workers that are known to have outlived the driver.

        Args:
            status: of the last driver, or of the one that looks for the workers of the last one.
            age_seconds: its age.

        Raises:
            OSError, UnreadableFileError: the progress of the workers cannot be read.
        """
        is_without_driver = (
            status.get("phase") == Phase.STARTING
            or bool(status.get("adopting"))
            or age_seconds > self._clock() - self._created  # of a driver before this supervisor
        )
        with files.reading(self._directory.status):
            generation = int(status.get("generation") or 0)
        path = self._directory.generation_logs(generation).progress
        progress = files.read_json(path) if is_without_driver else None
        if progress is None:
            self._last = None
            return status
        with files.reading(path):
            silent = self._silent_seconds(generation, int(progress["heartbeat"]))
            usual = progress.get("heartbeatSeconds")
            if silent is None or silent > max_silence(None if usual is None else float(usual)):
                is_further = (progress.get("step") or 0) > (status.get("step") or 0)  # it has no step before the first
                return {**status, **_reached(progress)} if is_further else status
            times = {"ageSeconds": silent, "silentSeconds": silent}
            return {**status, **status_fields(progress), **times, "adopting": True, "message": WORKERS_TRAIN_ON}

    def _silent_seconds(self, generation: int, heartbeat: int) -> float | None:
        """Seconds since the heartbeat was seen to change; None before its first change."""
        last, now = self._last, self._clock()
        if last is None or last.generation != generation:
            last = _Heartbeat(generation, heartbeat, now, has_changed=False)
        elif last.number != heartbeat:
            last = _Heartbeat(generation, heartbeat, now, has_changed=True)
        self._last = last
        return round(now - last.since, 1) if last.has_changed else None
