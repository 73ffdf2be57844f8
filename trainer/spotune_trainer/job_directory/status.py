"""`status.json`: the phases of a run; reads the status, and writes a phase while no driver runs."""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory


class Phase(StrEnum):
    """What a run is doing; the field `phase` of `status.json`."""

    STARTING = "Starting"
    """No driver has published a status yet, or not since the job was tried again."""
    PREPARING = "Preparing"
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    LOADING = "Loading"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    EXPORTING = "Exporting"
    DONE = "Done"
    FAILED = "Failed"


def publish_phase(directory: JobDirectory, phase: Phase, message: str | None) -> None:
    """Write a phase while no driver runs; if the status has this phase already, keep the driver's message."""
    status = files.read_json(directory.status) or {}
    if status.get("phase") != phase:
        directory.root.mkdir(parents=True, exist_ok=True)
        changes = {"phase": phase.value, "message": message, "time": time.time()}
        files.write_json(directory.status, {"heartbeat": 0, **status, **changes})


_FULL_BYTES = 1 << 20
"""A volume with fewer free bytes counts as full."""


def read_status(directory: JobDirectory) -> dict[str, Any] | None:
    """The driver's last status, with its age in seconds as `ageSeconds`; None before the first one.

    On a full volume the driver cannot write this problem to the status, so it is determined here.

    Raises:
        OSError, UnreadableFileError: the volume is unavailable, or the file is damaged.
    """
    status: dict[str, Any] | None = files.read_json(directory.status)
    if status is not None:
        with files.reading(directory.status):
            status["ageSeconds"] = round(max(0.0, time.time() - status["time"]), 3)
        status["checkpointProblem"] = _full_volume_message(directory.root) or status.get("checkpointProblem")
    return status


def _full_volume_message(path: Path) -> str | None:
    """The message that a volume is full; None while there is space for a status."""
    volume = os.statvfs(path)
    free, size = volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize
    if free > _FULL_BYTES:
        return None
    return f"No space left on the volume: {free / 1e6:,.1f} MB of {size / 1e9:,.1f} GB are free"
