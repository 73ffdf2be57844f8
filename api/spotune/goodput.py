"""Goodput: the fraction of a job's time spent on steps that count, and the parts that make up the rest.

The parts never overlap, so they sum to the wall clock. Goodput is productive time over elapsed time, as in "ML
Productivity Goodput" (Google Cloud, 2024). Llama 3 calls the same ratio effective training time (Dubey et al. 2024,
"The Llama 3 Herd of Models", section 3.3.4).
"""

from collections.abc import Mapping
from enum import StrEnum


class Part(StrEnum):
    """The parts of a job's time. The values are the keys in `status.json`, the ledger and the metrics."""

    PRODUCTIVE = "productive"
    """Steps that contribute to the model and have not been rolled back."""
    EVALUATION = "evaluation"
    """Evaluation and export."""
    DATA_WAIT = "dataWait"
    """Training waits for its samples."""
    CHECKPOINT_STALL = "checkpointStall"
    """Training waits for a checkpoint."""
    RESTORE = "restore"
    """Loading the checkpoint that a worker group resumes from."""
    LOST = "lost"
    """Rolled-back steps, the unfinished step when a worker group is lost, and the time to detect the loss."""
    STARTUP = "startup"
    """Starting and stopping processes, preparing data, planning and building the model."""
    WAITING = "waiting"
    """Waiting for workers, for a new head, or for the backoff of the retry policy."""
    STOPPED = "stopped"
    """Suspended, completed or failed: no training was requested."""


def goodput(seconds: Mapping[Part, float]) -> float | None:
    """Productive time over wall clock, from 0 to 1; None before any time has passed.

    Stopped time does not count, so suspending a job does not lower its goodput.

    Args:
        seconds: Time by part, in any unit.
    """
    wall_clock = sum(seconds.values()) - seconds.get(Part.STOPPED, 0)
    return seconds.get(Part.PRODUCTIVE, 0) / wall_clock if wall_clock > 0 else None
