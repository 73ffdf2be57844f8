"""Goodput as it is published, and what the ledger has to hold for it: the figures of generations that have ended.

A generation's own figures lie in its folder, so that they outlive its driver: what a lost head could not record is
recorded by the next driver, from the last sign of life in the files of the workers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from spotune.goodput import Part, goodput
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import steps_after
from spotune_trainer.files import LineReader
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.goodput import ACCOUNTED_EVENTS, generation_parts, measured_parts, tally


class GoodputAccount:
    """Goodput of a job so far. Reads of the ledger only what is new, and no steps at all.

    Args:
        directory: of the job.
    """

    def __init__(self, directory: JobDirectory) -> None:
        self._events = LineReader(directory.ledger)
        self._records: list[dict[str, Any]] = []
        self._tally = tally([])

    def figures(self, now: float, progress: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`goodput` and `goodputParts` of `status.json` and `result.json`.

        Args:
            now: seconds since the epoch.
            progress: `progress.json` of the worker group that runs, if it has written one.
        """
        news = [record for record in self._events.read() if record["event"] in ACCOUNTED_EVENTS]
        if news:
            self._records += news
            self._tally = tally(self._records)
        measured, doing = {}, None
        if progress is not None and self._tally.generation is not None and self._tally.since is not None:
            measured, doing = measured_parts(progress, self._tally.since / 1000), Part(progress["part"])
        seconds = self._tally.seconds(now, measured, doing)
        share = goodput(seconds)
        return {
            "goodput": None if share is None else round(share, 4),
            "goodputParts": {str(part): value for part, value in seconds.items()},
        }


def record_end(ledger: Ledger, directory: JobDirectory, generation: int, ended: float, *, failed: bool) -> None:
    """Record the end of a generation that the ledger has seen start, and where its time went.

    Args:
        ledger: of the job.
        directory: of the job.
        generation: its number.
        ended: when it ended, in seconds since the epoch.
        failed: whether it ended otherwise than it was meant to.
    """
    start = next(record for record in ledger.records("generation-started") if record["generation"] == generation)
    began = start["time"]
    logs = directory.generation_logs(generation)
    steps = list(files.read_lines(logs.steps))
    productive = sum(step.get("productiveSeconds", 0.0) for step in steps)
    seconds = round(max(0.0, ended - began), 3)
    ledger.append(
        "generation-ended",
        generation=generation,
        worldSize=start["worldSize"],
        seconds=seconds,
        steps=len(steps),
        parts=generation_parts(files.read_json(logs.progress), began, seconds, productive, failed=failed),
    )


def record_lost_ends(ledger: Ledger, directory: JobDirectory) -> None:
    """Record the end of generations whose driver was lost with them: they lived until their workers' last sign."""
    ended = {record["generation"] for record in ledger.records("generation-ended")}
    for start in ledger.records("generation-started"):
        if start["generation"] not in ended:
            progress = files.read_json(directory.generation_logs(start["generation"]).progress)
            last_sign = min(progress["time"], time.time()) if progress else start["time"]
            record_end(ledger, directory, start["generation"], last_sign, failed=True)


def seconds_lost(directory: JobDirectory, step: int) -> float:
    """Productive seconds of the steps after `step`, which a worker group that starts from it makes again."""
    lost: float = sum(record.get("productiveSeconds", 0.0) for record in steps_after(directory, step))
    return round(lost, 3)
