"""What a worker group is asked to do, and how it may end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from spotune.plan.checkpoint_interval import SECONDS_TO_PREEMPTION
from spotune_trainer.job_directory.layout import GenerationLogs, JobDirectory


class Ending(StrEnum):
    """How a worker group ends that does not fail."""

    TRAINED = "trained"
    STOPPED = "stopped"
    """Committed and left, as the whole run was told to."""
    LEFT = "left"
    """Committed and left, so that another group can go on."""


@dataclass(frozen=True)
class WorkerTask:
    """What the driver asks of every rank of one generation; plain values, since it travels to other machines.

    Attributes:
        directory: the job's folder on the volume.
        generation: number that this worker group claimed.
        restore: name of the checkpoint to start from; None: from the beginning.
        job: the job as JSON.
        plan: the plan as JSON.
        seconds_to_preemption: mean time until a worker is taken away, as far as is known.
        commit_seconds: what the last commit took until it was durable; None: there was none.
    """

    directory: str
    generation: int
    restore: str | None
    job: dict[str, Any]
    plan: dict[str, Any]
    seconds_to_preemption: float = SECONDS_TO_PREEMPTION
    commit_seconds: float | None = None

    @property
    def logs(self) -> GenerationLogs:
        """What the ranks of this generation write."""
        return JobDirectory(Path(self.directory)).generation_logs(self.generation)
