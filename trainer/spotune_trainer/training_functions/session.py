"""What a training function of the user reports and saves, and what it learns of its worker group.

All ranks report and save together. A report is progress for status, hang detection and retries. What is saved is a
commit, from which the next worker group resumes. A group that has to leave does so after a commit: a function can only
be interrupted where its state is saved.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from spotune.errors import InfrastructureError, JobError
from spotune.goodput import Part
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.task import RankExit
from spotune_trainer.training_functions.background_commit import BackgroundCommit
from spotune_trainer.training_functions.checkpoints import FolderCheckpoints
from spotune_trainer.training_functions.notices import NoticeReader
from spotune_trainer.training_functions.ranks import Call, Maxima, Ranks
from spotune_trainer.training_functions.reporting import finite_numbers

logger = logging.getLogger("spotune.worker")

_NO_NOTICE = -math.inf
_NO_DEADLINE_SECONDS = 1e300
"""In what ranks agree on, which is finite for every notice."""
_LONG_STEP_SECONDS = 0.5
"""From here on, reports wait until the ranks have agreed: the time does not matter, and a notice must not wait."""
_AGREEMENT_SECONDS = 0.25
_MAX_REPORTS = 8
"""Reports of shorter steps agree so often, or after so many of them: an exchange costs a part of a millisecond."""


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
    """Reports and commits of one rank in one generation.

    Args:
        generation: of the worker group.
        restored: the checkpoint that it starts from, and its folder; None at the beginning.
        checkpoints: commits what is saved.
        ranks: of the group.
        reporter: writes progress, steps and events.
        notices: files that ask the group to leave, and that this rank reads; perhaps none.
        field: of the job that names the code, for messages.
        may_repeat: whether the first step may be one before the checkpoint: a program may have checkpoints of its own.
        clock: seconds, monotonic.
        leave: makes the exception that ends the function when the group leaves.

    Attributes:
        ranks: of the group.
        step: of the last report; at first that of the checkpoint.
        last_commit: the newest checkpoint, of this generation or restored; None before the first.
        seconds_left: until the deadline of a notice, as the ranks have agreed last; infinite without a deadline, None
            without a notice.
    """

    def __init__(
        self,
        generation: int,
        restored: tuple[CheckpointName, Path] | None,
        checkpoints: FolderCheckpoints,
        ranks: Ranks,
        reporter: ProgressReporter,
        notices: tuple[Path, ...],
        *,
        field: str,
        may_repeat: bool = False,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[RankExit], BaseException] = LeaveGeneration,
    ) -> None:
        self.ranks = ranks
        self.step = restored[0].step if restored else 0
        self.last_commit = restored
        self.seconds_left: float | None = None
        self._generation = generation
        self._checkpoints = checkpoints
        self._reporter = reporter
        self._notices = NoticeReader(notices, clock)
        self._field = field
        self._may_repeat = may_repeat
        self._clock = clock
        self._leave = leave
        self._last_report = clock()
        self._stall_seconds = 0.0  # since the last report
        self._exit: RankExit | None = None
        self._has_reported = False
        self._has_long_steps = True
        self._unagreed_reports = 0  # that come before the next agreement
        self._longest_step_seconds = 0.0  # since the last agreement
        self._agreement: tuple[Call, int, Maxima] | None = None  # that the ranks have begun, and not read yet
        self._running_commit: BackgroundCommit | None = None
        self._lock = threading.Lock()

    def report(
        self,
        metrics: Mapping[str, Any],
        folder: Path | None = None,
        step: int | None = None,
        total_steps: int | None = None,
        *,
        may_save: bool = True,
    ) -> None:
        """Report progress, and commit a checkpoint if any rank hands over a folder. All ranks call it together.

        Args:
            metrics: those of rank 0 are shown; its `loss` is that of status and curves. Only numbers are kept.
            folder: of this rank's files; they are copied. None: it has none.
            step: number of steps done; None: one more than at the last report.
            total_steps: of the whole job; None: it is not known.
            may_save: whether any rank may hand over a folder. If not, and if steps are short, this does not wait for
                the other ranks at once: they agree by a later call.

        Raises:
            LeaveGeneration: the group leaves; the state is committed.
            JobError: the step is not later than the last one, or the ranks report different steps.
            InfrastructureError: the volume refuses the files.
            SupersededError: a later generation has started.
        """
        with self._lock, self._errors_of_the_volume("report"):
            step = self.step + 1 if step is None else step
            if step <= self.step and not self._repeats(step):
                raise JobError(
                    f"{self._field} reported step {step} after step {self.step}: report each step once, in "
                    "ascending order, and continue after the checkpoint's step"
                )
            self._settle()
            self._longest_step_seconds = max(self._longest_step_seconds, self._clock() - self._last_report)
            has_checkpoint = False
            if may_save or not self._unagreed_reports:
                self._begin_agreement(Call.REPORT, step, flag=folder is not None)
                has_checkpoint = self._settle() if may_save or self._has_long_steps else False
            else:
                self._unagreed_reports -= 1
            self.step = step
            self._record(metrics, total_steps)
            if has_checkpoint:
                self._commit(folder, wait=True, discard=lambda: None)

    def begin_save(self, step: int, *, is_sharded: bool) -> bool | None:
        """Agree to save the last reported step, or a later one. All ranks call it together, and `save` afterwards.

        Args:
            step: number of steps done.
            is_sharded: whether this rank's state is a part of the whole.

        Returns:
            Whether the state of any rank is; None if the step has a checkpoint already, so nothing is to be saved.

        Raises:
            JobError: the step is earlier than the last one, or the ranks save different steps.
            InfrastructureError: the volume refuses the files of the checkpoint before.
            SupersededError: a later generation has started.
        """
        with self._lock, self._errors_of_the_volume("checkpoint"):
            if step < self.step and not self._repeats(step):
                raise JobError(
                    f"{self._field} saved step {step} after step {self.step}: save the state of the last step"
                )
            is_any_sharded = self._agree(Call.SAVE, step, flag=is_sharded)
            if step != self.step:
                self.step = step
                self._record({})
            return None if step == self.newest_saved_step else is_any_sharded

    def save(self, folder: Path | None, discard: Callable[[], None], *, wait: bool) -> None:
        """Commit a checkpoint of the step of `begin_save`. All ranks call it together.

        Args:
            folder: of this rank's files, which must not change until `discard` is called. None: it has none.
            discard: called once they are copied, also after an error.
            wait: return once the checkpoint is durable. If false, files are copied meanwhile; the next checkpoint, or
                the end of the function, waits for them.

        Raises:
            LeaveGeneration: the group leaves; the state is committed.
            InfrastructureError: the volume refuses the files, also those of the checkpoint before.
            SupersededError: a later generation has started.
        """
        with self._lock, self._errors_of_the_volume("checkpoint"):
            self._commit(folder, wait=wait, discard=discard)

    def finish(self) -> None:
        """To be called once the function has returned, by all ranks together.

        Raises:
            JobError: on all ranks: they have not reported the same steps, or there is no checkpoint.
        """
        with self._lock, self._errors_of_the_volume("checkpoint"):
            self._agree(Call.RETURN, self.step)
            self._wait_for_commit()
        if self.last_commit is None:
            raise JobError(
                f"{self._field} returned and has saved no checkpoint, so there is no model: pass one to "
                "ray.train.report, or call spotune_train.checkpoint.save, before it returns"
            )

    def finish_commits(self) -> None:
        """Wait until the checkpoint that is being copied is durable. All ranks call it together.

        Raises:
            InfrastructureError: the volume refuses its files.
        """
        with self._lock, self._errors_of_the_volume("checkpoint"):
            with suppress(Exception):  # of another rank, which has ended
                self._settle()
            self._wait_for_commit()

    def abandon(self) -> None:
        """To be called if the function has failed: wait for the commit in the background, whatever becomes of it.

        The commits of the other ranks go on without their functions, so it is complete, or a rank is lost.
        """
        with self._lock, suppress(Exception):
            self._wait_for_commit()

    def show_alive(self) -> None:
        """Show that the process runs, while the function has not reported for a while. This resets no watchdog."""
        if self._lock.acquire(blocking=False):
            try:
                self._reporter.show_alive()
            finally:
                self._lock.release()

    def newest_checkpoint(self) -> tuple[CheckpointName, Path] | None:
        """The newest checkpoint, and its folder with the files of all ranks, which must not be changed.

        None before the first. If a bucket keeps the job, files of other nodes are downloaded. Any rank may call it
        alone.

        Raises:
            CorruptCheckpointError: the bucket has another file than was committed.
            InfrastructureError: the bucket cannot be read.
        """
        if self.last_commit is not None:
            with self._errors_of_the_volume("checkpoint"):
                self._checkpoints.fetch(self.last_commit[0])
        return self.last_commit

    @contextmanager
    def _errors_of_the_volume(self, what: str) -> Iterator[None]:
        """Turn an error of a file of ours, which is none of the function, into one of the infrastructure."""
        try:
            yield
        except OSError as error:
            raise InfrastructureError(f"the {what} of step {self.step} failed: {error}") from error

    def _repeats(self, step: int) -> bool:
        """Whether a step before the checkpoint is the first one of a group that may begin there."""
        if not self._may_repeat or self._has_reported or step < 1:
            return False
        logger.warning("begins with step %d again, before the checkpoint of step %d", step, self.step)
        return True

    def _agree(self, call: Call, step: int, *, flag: bool = False) -> bool:
        """Whether the flag of any rank is set; see `_settle`."""
        self._settle()
        self._begin_agreement(call, step, flag=flag)
        return self._settle()

    def _begin_agreement(self, call: Call, step: int, *, flag: bool) -> None:
        """Tell the other ranks what this one does. Those that read notices tell whether the group leaves, and when."""
        rank_exit, left = self._notices.read()
        stops, leaves = rank_exit is RankExit.STOPPED, rank_exit is RankExit.YIELDED
        urgency = _NO_NOTICE if left is None else -min(left, _NO_DEADLINE_SECONDS)
        copies = self._running_commit is not None and not self._running_commit.has_ended
        longest, self._longest_step_seconds = self._longest_step_seconds, 0.0
        doing = [step, -step, call.value, -call.value, flag, copies]
        self._agreement = call, step, self.ranks.begin_maxima([*doing, stops, leaves, urgency, longest])

    def _settle(self) -> bool:
        """Wait for what the ranks have agreed on last, if that was not read yet; whether the flag of any rank is set.

        Raises:
            JobError: on all ranks: they are at different steps, or do different things.
            Exception: a commit in the background has failed.
        """
        if self._agreement is None:
            return False
        (call, step, maxima), self._agreement = self._agreement, None
        latest, earliest, last_call, first_call, any_flag, copy, stop, leave, urgency, longest = maxima.wait()
        if latest != -earliest or last_call != -first_call:
            raise JobError(
                f"{self._field} {call.describe(step)} on rank {self.ranks.rank}, while other ranks did something "
                "else: all ranks have to report and save the same steps, and to return after the same one"
            )
        if (stop or leave) and self._exit is None:
            logger.info("the worker group leaves after the next checkpoint of %s", self._field)
        self._exit = RankExit.STOPPED if stop else RankExit.YIELDED if leave else None
        has_deadline = urgency > -_NO_DEADLINE_SECONDS
        self.seconds_left = None if urgency == _NO_NOTICE else -urgency if has_deadline else math.inf
        if call is Call.REPORT:
            self._has_long_steps = longest >= _LONG_STEP_SECONDS
            self._unagreed_reports = max(min(_MAX_REPORTS, int(_AGREEMENT_SECONDS / max(longest, 1e-6))) - 1, 0)
        if not copy:
            self._wait_for_commit()
        return bool(any_flag > 0)

    def _record(self, metrics: Mapping[str, Any], total_steps: int | None = None) -> None:
        now = self._clock()
        seconds, self._last_report = now - self._last_report, now
        stall_seconds, self._stall_seconds = self._stall_seconds, 0.0
        if self.ranks.rank == 0:
            self._reporter.record_report(
                generation=self._generation,
                step=self.step,
                metrics=finite_numbers(metrics),
                seconds=seconds,
                productive_seconds=seconds - stall_seconds,
                total_steps=total_steps,
                world_size=self.ranks.world_size,
            )
        if self._has_reported:
            self._reporter.heartbeat()
        else:
            self._has_reported = True
            self._reporter.record_startup("firstStep")
            self._reporter.set_phase(Phase.TRAINING)

    @property
    def newest_saved_step(self) -> int | None:
        """Step of the newest checkpoint, also of one that is being copied."""
        if self._running_commit is not None:
            return self._running_commit.step
        return self.last_commit[0].step if self.last_commit is not None else None

    def _commit(self, folder: Path | None, *, wait: bool, discard: Callable[[], None]) -> None:
        self._wait_for_commit()
        commit = partial(self._checkpoints.commit, self.step, folder, self._reporter.sync)
        self._running_commit = BackgroundCommit(self.step, commit, discard, self._clock)
        if wait or self._exit is not None:
            self._wait_for_commit()
        if self._exit is not None:
            raise self._leave(self._exit)

    def _wait_for_commit(self) -> None:
        """Wait for the commit in the background, if there is one, and report it."""
        commit, self._running_commit = self._running_commit, None
        if commit is None:
            return
        began = self._clock()
        with self._reporter.stopwatch.measure(Part.CHECKPOINT_STALL), self._checkpoints.heartbeats():
            committed = commit.wait()
        self.last_commit = committed.name, committed.path
        stall_seconds = self._clock() - began
        self._stall_seconds += stall_seconds
        self._report_commit(committed, commit.seconds, stall_seconds)

    def _report_commit(self, committed: Checkpoint, seconds: float, stall_seconds: float) -> None:
        self._reporter.update(lastCheckpoint={"step": committed.name.step, "time": committed.manifest.time})
        self._reporter.record_event(
            "committed",
            step=committed.name.step,
            checkpoint=str(committed.name),
            seconds=round(seconds, 3),
            stallSeconds=round(stall_seconds, 4),
            bytes=committed.bytes,
        )
        self._reporter.heartbeat()


_current: Session | None = None


def enter_session(session: Session) -> None:
    """Make a session that of this process, which calls one training function in its life."""
    global _current  # noqa: PLW0603 - the function asks for it as Ray Train's functions ask for theirs
    _current = session


def current_session() -> Session | None:
    """The session of this process; None outside of the workers of a job with a training function."""
    return _current
