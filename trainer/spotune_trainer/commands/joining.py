"""The session of a process that a command has started, for `spotune_train`.

The process reports and commits in place of the rank that runs the command. That rank sees the file of the process, and
leaves `progress.json` to it. torchrun and other launchers know nothing of this.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from types import TracebackType
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from spotune.errors import JobError
from spotune.goodput import Part
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.bucket.generation_logs import GenerationLogUpload
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.commands.environment import joined_task, place_of_process
from spotune_trainer.observability.logs.line_format import logging_to_file
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.failures import describe, record_failure
from spotune_trainer.training.task import RankExit, RankPlacement, WorkerTask
from spotune_trainer.training_functions.opening import open_session
from spotune_trainer.training_functions.session import LeaveGeneration, Session, enter_session


class LeaveProgram(LeaveGeneration, SystemExit):
    """Ends the process with status 0 after a commit, because its worker group leaves."""

    def __init__(self, rank_exit: RankExit) -> None:
        super().__init__(rank_exit)
        self.code = 0


def join_command() -> Session | None:
    """Make this process a rank of the generation whose command has started it. All its processes call it together.

    Returns:
        The session; None if no command of a job has started this process.

    Raises:
        JobError: there are several processes, and no process group yet.
    """
    task = joined_task(os.environ)
    if task is None:
        return None
    place = place_of_process(os.environ)
    if distributed.is_initialized():
        place = replace(place, rank=distributed.get_rank(), world_size=distributed.get_world_size())
    elif place.world_size > 1:
        raise JobError(
            "spotune_train needs the process group: call torch.distributed.init_process_group before its first function"
        )
    job = FinetuneJob.model_validate(task.job)
    logs = task.logs
    _record_uncaught_failures(task, place)
    _write_state(task, place, {"exit": None, "savedStep": None, "ended": False})
    resources = ExitStack()
    resources.enter_context(logging_to_file(logs.worker(place.rank)))
    bucket, upload = bucket_of(task.job_directory), None
    if bucket is not None:
        upload = resources.enter_context(GenerationLogUpload.of_program(bucket, task.job_directory, logs, place.rank))
    reporter = ProgressReporter(logs, place.rank, job.spec.retry.hang_timeout.seconds, upload=upload)
    reporter.continue_startup()
    resources.enter_context(reporter)
    reporter.record_startup("program")
    session = open_session(task, place, job, reporter, leave=partial(_leave, task, place))
    resources.enter_context(reporter.stopwatch.measure(Part.PRODUCTIVE))
    atexit.register(_finish, task, place, session, resources)
    _commit_before_groups_are_destroyed(session)
    enter_session(session)
    return session


def _leave(task: WorkerTask, place: RankPlacement, rank_exit: RankExit) -> LeaveProgram:
    _write_state(task, place, {"exit": rank_exit.value, "savedStep": None, "ended": True})
    return LeaveProgram(rank_exit)


def _finish(task: WorkerTask, place: RankPlacement, session: Session, resources: ExitStack) -> None:
    """Finish the commit in the background, and say which step was saved last."""
    try:
        state = files.read_json(task.logs.command_process(place.node)) or {}
        _write_state(task, place, {**state, "savedStep": session.newest_saved_step, "ended": True})
        session.finish_commits()
    finally:
        resources.close()


def _write_state(task: WorkerTask, place: RankPlacement, state: dict[str, Any]) -> None:
    """Tell the rank that runs the command. The first process of each node does."""
    if place.local_rank == 0:
        files.write_json(task.logs.command_process(place.node), state)


def _record_uncaught_failures(task: WorkerTask, place: RankPlacement) -> None:
    """Record the exception that ends this process: launchers report an exit status alone."""
    show = sys.excepthook

    def record_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        record_failure(task.logs, describe(place.rank, error))
        show(kind, error, trace)

    sys.excepthook = record_and_show


def _commit_before_groups_are_destroyed(session: Session) -> None:
    """Finish the commit in the background before the program destroys its process groups, which the commit needs."""
    destroy = distributed.destroy_process_group

    @wraps(destroy)
    def destroy_after_commit(group: Any = None) -> None:
        session.finish_commits()
        destroy(group)

    distributed.destroy_process_group = distributed_c10d.destroy_process_group = destroy_after_commit
