"""One rank of a job with a training function: restore, call the function, export what it has reported last."""

from __future__ import annotations

import logging
import os
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
from spotune_trainer.engine.deepspeed_operators import compile_no_operators
from spotune_trainer.engine.process_groups import extend_timeouts
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.observability.repeating import repeating
from spotune_trainer.training.task import RankExit, RankPlacement, WorkerTask
from spotune_trainer.training.worker import TrainResult, wait_for_rendezvous
from spotune_trainer.training_functions.checkpoints import STORAGE_ERRORS
from spotune_trainer.training_functions.export import export_model
from spotune_trainer.training_functions.locate import FIELD, load_function
from spotune_trainer.training_functions.opening import open_session
from spotune_trainer.training_functions.ray_train import SessionUtils, run_with_ray_train, takes_argument
from spotune_trainer.training_functions.reporting import reporting
from spotune_trainer.training_functions.session import LeaveGeneration, Session, enter_session

logger = logging.getLogger("spotune.worker")

_ALIVE_SECONDS = 2.0


def run_function(task: WorkerTask, place: RankPlacement) -> TrainResult:
    """Call the job's training function as one rank. An exception is logged and recorded, then raised."""
    with reporting(task, place) as (job, reporter), _output_to(task.logs.worker(place.rank)):
        result = _FunctionWorker(task, job, place, reporter).train()
        logger.info("rank %d ends: %s", place.rank, result.exit.value)
        return result


class _FunctionWorker:
    """One rank that calls a training function."""

    session: Session

    def __init__(self, task: WorkerTask, job: FinetuneJob, place: RankPlacement, reporter: ProgressReporter) -> None:
        self.task = task
        self.job = job
        self.place = place
        self.reporter = reporter

    def train(self) -> TrainResult:
        training, place = self.job.spec.training, self.place
        if not self.job.spec.workers.gpus:
            compile_no_operators()
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
        extend_timeouts(self.job.spec.retry.hang_timeout.seconds, distributed.group.WORLD)
        reporter.record_startup("rendezvous")
        self.session = open_session(task, place, self.job, reporter)
        enter_session(self.session)
        return SessionUtils(self.job.metadata.name, place, self.session)

    def _finish(self) -> None:
        """Export the last checkpoint. The process group still exists, since rank 0 may take long.

        Raises:
            JobError: the function has reported no checkpoint, or the ranks have not reported the same steps.
        """
        self.session.finish()
        assert self.session.last_commit is not None, "finish() has checked it"
        name, _ = self.session.last_commit
        with self.reporter.stopwatch.measure(Part.EVALUATION):
            ranks, step = self.session.ranks, self.session.step
            self.summary, *_ = ranks.gather_results(
                lambda: export_model(self.task, name, step, self.reporter) if ranks.rank == 0 else {}
            )


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
