"""What a training function of the user reports, and what it learns of its worker group.

All ranks report together. A report is progress for status, hang detection and retries. One with a checkpoint is also a
commit, from which the next worker group resumes. A group that has to leave does so after a commit: a function can only
be interrupted where its state is saved.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from spotune.errors import InfrastructureError, JobError
from spotune.goodput import Part
from spotune_trainer import files
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import RankExit
from spotune_trainer.training_functions.checkpoints import FolderCheckpoints
from spotune_trainer.training_functions.ranks import Ranks

logger = logging.getLogger("spotune.worker")

_POLL_SECONDS = 0.5


class LeaveGeneration(BaseException):
    """Ends the training function after a commit, because its worker group leaves.

    It is no `Exception`, so that the function does not catch it.

    Attributes:
        exit: whether the run stops, or another worker group continues.
    """

    def __init__(self, rank_exit: RankExit) -> None:
        super().__init__(rank_exit.value)
        self.exit = rank_exit


class Session:
    """Reports of one rank in one generation.

    Args:
        generation: of the worker group.
        restored: the checkpoint that it starts from, and its folder; None at the beginning.
        checkpoints: commits what is reported.
        ranks: of the group.
        reporter: writes progress, steps and events.
        notices: files that ask the group to leave, read by rank 0.
        clock: seconds, monotonic.

    Attributes:
        step: of the last report; at first that of the checkpoint.
        last_commit: the newest checkpoint, of this generation or restored; None before the first.
        seconds_left: until the deadline of a notice, as of the last report; infinite without a deadline, None without
            a notice.
    """

    def __init__(
        self,
        generation: int,
        restored: tuple[CheckpointName, Path] | None,
        checkpoints: FolderCheckpoints,
        ranks: Ranks,
        reporter: ProgressReporter,
        notices: tuple[Path, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step = restored[0].step if restored else 0
        self.last_commit = restored
        self.seconds_left: float | None = None
        self._generation = generation
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._reporter = reporter
        self._notices = notices
        self._clock = clock
        self._last_report = clock()
        self._last_poll = float("-inf")
        self._exit: RankExit | None = None
        self._has_reported = False
        self._lock = threading.Lock()

    def report(self, metrics: Mapping[str, Any], folder: Path | None = None, step: int | None = None) -> None:
        """Report progress, and commit a checkpoint if any rank hands over a folder. All ranks call it together.

        Args:
            metrics: those of rank 0 are shown; its `loss` is that of status and curves. Only numbers are kept.
            folder: of this rank's files; they are copied. None: it has none.
            step: number of steps done; None: one more than at the last report.

        Raises:
            LeaveGeneration: the group leaves; the state is committed.
            JobError: the step is not later than the last one, or the ranks report different steps.
            InfrastructureError: the volume refuses the files.
            SupersededError: a later generation has started.
        """
        with self._lock:
            try:
                self._report(metrics, folder, self.step + 1 if step is None else step)
            except OSError as error:  # of the volume, and not of the function
                raise InfrastructureError(f"the report of step {self.step} failed: {error}") from error

    def _report(self, metrics: Mapping[str, Any], folder: Path | None, step: int) -> None:
        if step <= self.step:
            raise JobError(
                f"training.function reported step {step} after step {self.step}: report each step once, in ascending "
                "order, and continue after the checkpoint's step"
            )
        has_checkpoint = self._agree(step, has_folder=folder is not None)
        self.step = step
        self._record(metrics)
        if has_checkpoint:
            self._commit(folder)
            if self._exit is not None:
                raise LeaveGeneration(self._exit)

    def finish(self) -> None:
        """To be called once the function has returned, by all ranks together.

        Raises:
            JobError: on all ranks: they have not reported the same steps, or there is no checkpoint.
        """
        with self._lock:
            self._agree(self.step, has_folder=False, has_ended=True)
        if self.last_commit is None:
            raise JobError(
                "training.function returned and has reported no checkpoint, so there is no model: pass one to "
                "ray.train.report before it returns"
            )

    def show_alive(self) -> None:
        """Show that the process runs, while the function has not reported for a while. This resets no watchdog."""
        if self._lock.acquire(blocking=False):
            try:
                self._reporter.show_alive()
            finally:
                self._lock.release()

    def checkpoint_folder(self) -> Path | None:
        """Folder of the newest checkpoint; None before the first. It must not be changed."""
        return self.last_commit[1] if self.last_commit is not None else None

    def _agree(self, step: int, *, has_folder: bool, has_ended: bool = False) -> bool:
        """Whether any rank has a checkpoint. Rank 0 tells the others whether the group leaves, and until when.

        Raises:
            JobError: on all ranks: they are at different steps, or the function has returned on some of them only.
        """
        rank_exit, left = self._read_notices() if self._ranks.rank == 0 else (None, None)
        stops, leaves = rank_exit is RankExit.STOPPED, rank_exit is RankExit.YIELDED
        mine = [has_folder, step, -step, has_ended, not has_ended, stops, leaves, -1.0 if left is None else left]
        values = torch.tensor(mine, dtype=torch.float64)
        distributed.all_reduce(values, op=distributed.ReduceOp.MAX, group=self._ranks.group)
        folder, latest, earliest, some_ended, some_report, stop, leave, seconds = values.tolist()
        if latest != -earliest or (some_ended and some_report):
            what = "returned" if has_ended else f"reported step {step}"
            raise JobError(
                f"training.function {what} on rank {self._ranks.rank}, while it is at another step on other ranks: all "
                "ranks have to report the same number of times"
            )
        self._exit = RankExit.STOPPED if stop else RankExit.YIELDED if leave else None
        self.seconds_left = seconds if seconds >= 0 else None
        return bool(folder > 0)

    def _read_notices(self) -> tuple[RankExit | None, float | None]:
        """Why the group leaves, and the seconds until it must have left; on rank 0, at most twice a second."""
        now = self._clock()
        if now - self._last_poll < _POLL_SECONDS:
            return self._exit, self.seconds_left
        self._last_poll = now
        rank_exit, left = None, None
        for path in self._notices:
            notice = files.read_json(path)
            if notice is None or not (notice["stop"] or notice.get("leave")):
                continue
            rank_exit = RankExit.STOPPED if notice["stop"] or rank_exit is RankExit.STOPPED else RankExit.YIELDED
            deadline = notice["deadline"]
            seconds = max(deadline - time.time(), 0.0) if deadline is not None else math.inf
            left = seconds if left is None else min(left, seconds)
        if rank_exit is not None and self._exit is None:
            logger.info("the worker group leaves after the next checkpoint of the training function")
        return rank_exit, left

    def _record(self, metrics: Mapping[str, Any]) -> None:
        now = self._clock()
        seconds, self._last_report = now - self._last_report, now
        if self._ranks.rank == 0:
            self._reporter.record_report(
                generation=self._generation,
                step=self.step,
                metrics=finite_numbers(metrics),
                seconds=seconds,
                world_size=self._ranks.world_size,
            )
        if self._has_reported:
            self._reporter.heartbeat()
        else:
            self._has_reported = True
            self._reporter.set_phase(Phase.TRAINING)

    def _commit(self, folder: Path | None) -> None:
        started = self._clock()
        with self._reporter.stopwatch.measure(Part.CHECKPOINT_STALL):
            committed = self._checkpoints.commit(self.step, folder, self._reporter.sync)
        self.last_commit = committed.name, committed.path
        self._report_commit(committed, self._clock() - started)
        self._last_report = self._clock()

    def _report_commit(self, committed: Checkpoint, seconds: float) -> None:
        self._reporter.update(lastCheckpoint={"step": committed.name.step, "time": committed.manifest.time})
        self._reporter.record_event(
            "committed",
            step=committed.name.step,
            checkpoint=str(committed.name),
            seconds=round(seconds, 3),
            stallSeconds=round(seconds, 4),
            bytes=committed.bytes,
        )
        self._reporter.heartbeat()


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are finite numbers, also those of NumPy and PyTorch."""
    found = {}
    for name, value in metrics.items():
        number: object = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            found[str(name)] = float(number)
    return found
