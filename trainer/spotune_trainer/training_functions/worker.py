"""One rank of a job with a training function: restore, call the function, export what it has reported last."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed

from spotune.entry_points import describe_error
from spotune.errors import JobError
from spotune.goodput import Part
from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.generations import raise_if_superseded, surviving_steps
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, open_checkpoint
from spotune_trainer.engine.process_groups import extend_timeouts
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.logs.line_format import logging_to_file
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.failures import describe, record_failure
from spotune_trainer.training.task import RankExit, RankPlacement, WorkerTask
from spotune_trainer.training.worker import TrainResult, wait_for_rendezvous
from spotune_trainer.training_functions.checkpoints import STORAGE_ERRORS, FolderCheckpoints
from spotune_trainer.training_functions.export import export_files
from spotune_trainer.training_functions.locate import FIELD, load_function
from spotune_trainer.training_functions.ranks import Ranks
from spotune_trainer.training_functions.ray_train import SessionUtils, run_with_ray_train, takes_argument
from spotune_trainer.training_functions.repeating import repeating
from spotune_trainer.training_functions.session import LeaveGeneration, Session, enter_session

logger = logging.getLogger("spotune.worker")

_ALIVE_SECONDS = 2.0


def run_function(task: WorkerTask, place: RankPlacement) -> TrainResult:
    """Call the job's training function as one rank. An exception is logged and recorded, then raised."""
    logs, rank = task.logs, place.rank
    job = FinetuneJob.model_validate(task.job)
    logs.root.mkdir(parents=True, exist_ok=True)
    with (
        logging_to_file(logs.worker(rank)),
        ProgressReporter(logs, rank, job.spec.retry.hang_timeout.seconds) as reporter,
    ):
        process = f"{socket.gethostname()}, process {os.getpid()}"
        start = task.restore or "the beginning"
        logger.info("rank %d of %d on %s: starts from %s", rank, place.world_size, process, start)
        try:
            with _output_to(logs.worker(rank)):
                result = _FunctionWorker(task, job, place, reporter).train()
        except BaseException as error:
            logger.exception("rank %d failed", rank)
            record_failure(logs, describe(rank, error))
            raise
        logger.info("rank %d ends: %s", rank, result.exit.value)
        return result


class _FunctionWorker:
    """One rank that calls a training function."""

    session: Session

    def __init__(self, task: WorkerTask, job: FinetuneJob, place: RankPlacement, reporter: ProgressReporter) -> None:
        self.task = task
        self.job = job
        self.place = place
        self.reporter = reporter
        self.plan = RunPlan.from_json(task.plan)

    def train(self) -> TrainResult:
        training, place = self.job.spec.training, self.place
        function = load_function(training.function, training.code)
        self.reporter.record_startup("import")
        if place.rank != 0:
            wait_for_rendezvous(place.address, place.port)
        try:
            root = self.task.job_directory.root
            run_with_ray_train(partial(self._call, function), self.job.metadata.name, root, self._set_up, self._finish)
        except LeaveGeneration as leave:
            return TrainResult(leave.exit, {})
        return TrainResult(RankExit.TRAINED, self.summary)

    def _call(self, function: Callable[..., Any]) -> None:
        """Call the user's function.

        Raises:
            JobError: it has raised an error of files, which are its own. Those of the volume are told apart by number.
        """
        config = dict(self.job.spec.training.config)
        alive = repeating(self.session.show_alive, _ALIVE_SECONDS, "alive")  # a function may report rarely
        with self.reporter.stopwatch.measure(Part.PRODUCTIVE), alive:
            try:
                function(config) if takes_argument(function) else function()
            except Exception as error:
                self.session.abandon()
                is_of_volume = isinstance(error, OSError) and error.errno in STORAGE_ERRORS
                if not isinstance(error, OSError) or is_of_volume or isinstance(error, ConnectionError | TimeoutError):
                    raise
                raise JobError(f"{FIELD} raised {describe_error(error)}") from error

    def _set_up(self) -> SessionUtils:
        """Restore the checkpoint of the generation. The process group exists."""
        task, place, reporter = self.task, self.place, self.reporter
        groups = [distributed.new_group(backend="gloo") for _ in range(2)]  # commits run beside the function
        extend_timeouts(self.job.spec.retry.hang_timeout.seconds, distributed.group.WORLD, *groups)
        self.reporter.record_startup("rendezvous")
        ranks, of_commits = (Ranks(place.rank, place.world_size, each, reporter.heartbeat) for each in groups)
        reporter.update(checkpointProblem=None)  # a later change from the background adds no field
        checkpoints = FolderCheckpoints(
            task.job_directory,
            task.generation,
            self.plan.fingerprint,
            self.plan.version,
            self.job.spec.checkpoint,
            of_commits,
            lambda problem: reporter.update(checkpointProblem=problem),
        )
        restored = None
        if task.restore is not None:
            name = CheckpointName.parse(task.restore)
            with reporter.stopwatch.measure(Part.RESTORE):
                restored = name, checkpoints.restore(name)
            reporter.record_event("restored", step=name.step, checkpoint=str(name))
            reporter.record_startup("restore")
        notices = (task.job_directory.notice, task.logs.notice, task.logs.agent_notice)
        self.session = Session(task.generation, restored, checkpoints, ranks, reporter, notices)
        starts_node = ranks.gather(place.local_rank == 0)
        node = sum(starts_node[: place.rank + 1]) - 1
        enter_session(self.session)
        return SessionUtils(self.job.metadata.name, place, node, self.session)

    def _finish(self) -> None:
        """Export the last checkpoint. The process group still exists, since rank 0 may take long.

        Raises:
            JobError: the function has reported no checkpoint, or the ranks have not reported the same steps.
        """
        self.session.finish()
        assert self.session.last_commit is not None, "finish() has checked it"
        name, _ = self.session.last_commit
        with self.reporter.stopwatch.measure(Part.EVALUATION):
            ranks = self.session.ranks
            self.summary, *_ = ranks.gather_results(lambda: self._export(name) if ranks.rank == 0 else {})

    def _export(self, name: CheckpointName) -> dict[str, Any]:
        directory, reporter = self.task.job_directory, self.reporter
        reporter.set_phase(Phase.EXPORTING)
        checkpoint = open_checkpoint(directory.checkpoints / str(name))
        assert isinstance(checkpoint, Checkpoint), "it was committed or verified by this group"
        fence = partial(raise_if_superseded, directory, self.task.generation)
        sha256 = export_files(checkpoint, directory.export, fence, reporter.heartbeat)
        reporter.update(exportStep=name.step)
        reporter.record_event("exported", sha256=sha256, step=name.step)
        if name.step < self.session.step:
            logger.warning("the model is that of step %d; later steps have no checkpoint", name.step)
        reporter.sync()
        steps = surviving_steps(directory)
        losses = [line["loss"] for line in steps if line.get("loss") is not None]
        return {
            "steps": self.session.step,
            "trainLoss": sum(losses) / len(losses) if losses else None,
            "metrics": steps[-1].get("metrics", {}) if steps else {},
            "exportStep": name.step,
            "exportSha256": sha256,
        }


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Write what this process prints to the rank's log, for the rest of its life, which is that of the generation."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    yield
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
