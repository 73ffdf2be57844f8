"""Goodput as it is published, and the ledger entries that it is computed from.

The measurements of a generation lie in its own folder, so they outlive its driver. A head may be lost before its driver
records the end of a generation. The next driver then records it, from the last sign of life in the workers' files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from spotune.goodput import Part, goodput
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import steps_after
from spotune_trainer.job_directory.events import EventReader
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.goodput import TIMELINE_EVENTS, generation_parts, measured_parts, time_breakdown


class GoodputMeter:
    """The goodput of a job so far. Each call reads only the ledger's new events, and no steps.

    Args:
        directory: the job's folder.
    """

    def __init__(self, directory: JobDirectory) -> None:
        self._reader = EventReader(directory.ledger)
        self._directory = directory
        self._events: list[dict[str, Any]] = []
        self._breakdown = time_breakdown([])

    def metrics(self, now: float, progress: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`goodput` and `goodputParts` of `status.json` and `result.json`.

        Args:
            now: seconds since the epoch.
            progress: `progress.json` of the running worker group, if it has written one.
        """
        new_events = [event for event in self._reader.read() if event["event"] in TIMELINE_EVENTS]
        if new_events:
            self._events += new_events
            with files.reading(self._reader.path):
                self._breakdown = time_breakdown(self._events)
        breakdown = self._breakdown
        generation = breakdown.running_generation
        if progress is None or generation is None or breakdown.open_since is None:
            seconds = breakdown.seconds(now)
        else:
            with files.reading(self._directory.generation_logs(generation).progress):
                measured = measured_parts(progress, breakdown.open_since / 1000)
                seconds = breakdown.seconds(now, measured, Part(progress["part"]))
        share = goodput(seconds)
        return {
            "goodput": None if share is None else round(share, 4),
            "goodputParts": {str(part): value for part, value in seconds.items()},
        }


def record_generation_ended(
    ledger: Ledger, directory: JobDirectory, generation: int, ended: float, *, failed: bool
) -> None:
    """Record the end of a generation, and where its time went.

    Args:
        ledger: of the job; holds the generation's start.
        directory: of the job.
        generation: its number.
        ended: when it ended, in seconds since the epoch.
        failed: whether it ended by a failure.
    """
    start = next(event for event in ledger.records("generation-started") if event["generation"] == generation)
    started = start["time"]
    logs = directory.generation_logs(generation)
    steps = list(files.read_lines(logs.steps))
    with files.reading(logs.steps):
        productive = sum(float(step.get("productiveSeconds", 0.0)) for step in steps)
    seconds = round(max(0.0, ended - started), 3)
    ledger.append(
        "generation-ended",
        generation=generation,
        worldSize=start["worldSize"],
        seconds=seconds,
        steps=len(steps),
        parts=generation_parts(files.read_json(logs.progress), started, seconds, productive, failed=failed),
    )


def record_lost_generations(ledger: Ledger, directory: JobDirectory, running: int | None = None) -> None:
    """Record the end of generations that were lost with their driver: the last sign of life of their workers.

    Args:
        ledger: of the job.
        directory: of the job.
        running: number of a generation that trains on without its driver.
    """
    ended = {event["generation"] for event in ledger.records("generation-ended")}
    for start in ledger.records("generation-started"):
        if start["generation"] not in ended and start["generation"] != running:
            progress = files.read_json(directory.generation_logs(start["generation"]).progress)
            last_sign = min(progress["time"], time.time()) if progress else start["time"]
            record_generation_ended(ledger, directory, start["generation"], last_sign, failed=True)


def productive_seconds_after(directory: JobDirectory, step: int) -> float:
    """Productive seconds of the steps after `step`: lost work for a worker group that starts from there."""
    lost: float = sum(record.get("productiveSeconds", 0.0) for record in steps_after(directory, step))
    return round(lost, 3)
