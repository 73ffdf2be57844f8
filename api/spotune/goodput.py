"""Goodput: the share of a job's time that went into steps that count, and where the rest of it went.

The time of a job is cut into parts that never overlap, so they sum to the wall clock. The word and the idea, productive
time over elapsed time, are those of "ML Productivity Goodput" (Google Cloud, 2024); Llama 3 calls the same ratio
effective training time (Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.4).
"""

from collections.abc import Mapping
from enum import StrEnum


class Part(StrEnum):
    """What a moment of a job was spent on; the values are the names in `status.json`, the ledger and the metrics."""

    PRODUCTIVE = "productive"
    """Steps that led to the model, as far as that is known by now."""
    EVALUATION = "evaluation"
    """Evaluation and export: work that was asked for, but no step."""
    DATA_WAIT = "dataWait"
    """Training waited for its samples."""
    CHECKPOINT_STALL = "checkpointStall"
    """Training waited for a checkpoint."""
    RESTORE = "restore"
    """Reading the checkpoint that a worker group starts from."""
    LOST = "lost"
    """Steps that were rolled back, the step that was under way when a worker group was lost, and noticing the loss."""
    STARTUP = "startup"
    """Starting and ending processes, preparing data, planning, building the model."""
    WAITING = "waiting"
    """Waiting for capacity: for workers, for a head that is gone, and the pauses of the retry policy."""
    STOPPED = "stopped"
    """Told to stop, trained or failed for good: nobody was to train."""


def goodput(seconds: Mapping[Part, float]) -> float | None:
    """Productive time over wall clock, from 0 to 1; None before any time has passed.

    The time in which nobody was to train does not count: a job that was suspended over a weekend is no worse for it.

    Args:
        seconds: By part; in any unit of time.
    """
    wall_clock = sum(seconds.values()) - seconds.get(Part.STOPPED, 0)
    return seconds.get(Part.PRODUCTIVE, 0) / wall_clock if wall_clock > 0 else None
