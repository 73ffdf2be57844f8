"""What a worker group is asked to do, and what Ray calls to have it done.

Light to import: Ray unpickles the train function in its controller too, which should not wait for DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spotune.plan.interval import SECONDS_TO_PREEMPTION


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
    """

    directory: str
    generation: int
    restore: str | None
    job: dict[str, Any]
    plan: dict[str, Any]
    seconds_to_preemption: float = SECONDS_TO_PREEMPTION


def train_function(task: dict[str, Any]) -> dict[str, Any]:
    """What Ray Train calls on every worker, in a thread of its process; Ray has set up the process group."""
    from torch import distributed

    from spotune_trainer.worker import run_worker

    trained = run_worker(WorkerTask(**task), distributed.get_rank(), distributed.get_world_size())
    return {"stopped": trained.stopped, "figures": trained.figures}
