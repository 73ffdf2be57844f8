"""Open the session of a rank: restore the checkpoint of its generation, and prepare reports and commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed

from spotune.goodput import Part
from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.engine.process_groups import extend_timeouts
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import RankExit, RankPlacement, WorkerTask
from spotune_trainer.training_functions.checkpoints import FolderCheckpoints
from spotune_trainer.training_functions.notices import notices_read_by
from spotune_trainer.training_functions.ranks import Ranks
from spotune_trainer.training_functions.session import LeaveGeneration, Session


def open_session(
    task: WorkerTask,
    place: RankPlacement,
    job: FinetuneJob,
    reporter: ProgressReporter,
    leave: Callable[[RankExit], BaseException] = LeaveGeneration,
) -> Session:
    """The session of a rank. All ranks call it together, once their process group exists.

    Args:
        task: of the generation.
        place: of the rank.
        job: the job.
        reporter: of the rank.
        leave: see `Session`.

    Raises:
        BucketError: on all ranks: the bucket that keeps the job cannot be read.
        CorruptCheckpointError: on all ranks: a file of the checkpoint is missing or damaged.
    """
    ranks, of_commits = (
        Ranks(place.rank, place.world_size, group, reporter.heartbeat, place.node)
        for group in _groups(place.world_size, job)
    )
    checkpoints = folder_checkpoints(task, job, reporter, of_commits)
    restored = None
    name = CheckpointName.parse(task.restore) if task.restore is not None else None
    if name is not None and not checkpoints.is_output(name):  # nothing continues from the model of a program
        with reporter.stopwatch.measure(Part.RESTORE):
            restored = name, checkpoints.restore(name)
        reporter.record_event("restored", step=name.step, checkpoint=str(name))
        reporter.record_startup("restore")
    return Session(
        task.generation,
        restored,
        checkpoints,
        ranks,
        reporter,
        notices_read_by(task, place),
        field=job.spec.training.user_code_field,
        may_repeat=bool(job.spec.training.command),
        leave=leave,
    )


def folder_checkpoints(
    task: WorkerTask, job: FinetuneJob, reporter: ProgressReporter, ranks: Ranks
) -> FolderCheckpoints:
    """The checkpoints of a job with code of the user.

    Args:
        task: of the generation.
        job: the job.
        reporter: of the rank; shows what holds up a commit.
        ranks: which commit together.
    """
    reporter.update(checkpointProblem=None)  # a later change from the background adds no field
    plan = RunPlan.from_json(task.plan)
    return FolderCheckpoints(
        task.job_directory,
        task.generation,
        job.spec.training.user_code_field,
        plan.fingerprint,
        plan.version,
        job.spec.checkpoint,
        ranks,
        lambda problem: reporter.update(checkpointProblem=problem),
        reporter.write_if_due,
    )


def _groups(world_size: int, job: FinetuneJob) -> tuple[Any, Any]:
    """Process groups for what the ranks agree on, and for commits, which run beside the user's code."""
    if world_size == 1:
        return None, None
    groups = distributed.new_group(backend="gloo"), distributed.new_group(backend="gloo")
    extend_timeouts(job.spec.retry.hang_timeout.seconds, *groups)
    return groups
