"""A rank's checkpoints while it trains: restore the one that the generation starts from, commit new ones.

A commit copies the state to host memory and returns; `AsyncCheckpointer` writes the files meanwhile. Rank 0 publishes
the manifest once the files of all ranks are durable. Commits do not overlap: a new one waits for the last one. With
shared memory, the copy outlives this process, and the next worker group restores from it. It begins to train before
the checksums of that copy are known, and neither commits nor evaluates until they are.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, TypeVar

from torch import distributed

from spotune.goodput import Part
from spotune_trainer.bucket.checkpoints import fetch_manifest
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.async_checkpointer import AsyncCheckpointer, CommitResult
from spotune_trainer.checkpoint.layout import (
    Checkpoint,
    CheckpointName,
    FileEntry,
    Manifest,
    UnusableCheckpoint,
    open_checkpoint,
)
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.policy import CommitPolicy
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.checkpoint.restore import Restore, RestoredBytes
from spotune_trainer.engine import zero_state
from spotune_trainer.training.context import TrainContext
from spotune_trainer.training.evaluations import Evaluations
from spotune_trainer.training.nonfinite_steps import BadSteps

T = TypeVar("T")


class Checkpointing:
    """Restores and commits the training state of one rank.

    Args:
        context: of the rank; its engine holds the state.
        policy: decides on rank 0 when to commit.
        bad_steps: counts of non-finite steps, which checkpoints contain.
        evaluations: so far, which checkpoints contain.
        memory: shared memory of the node; None without.

    Attributes:
        last_commit: newest checkpoint that was committed or restored, perhaps not durable yet; None before the first.
        commit_seconds: how long the last commit took until it was durable; None if there was none.
    """

    def __init__(
        self,
        context: TrainContext,
        policy: CommitPolicy,
        bad_steps: BadSteps,
        evaluations: Evaluations,
        memory: RankMemory | None = None,
    ) -> None:
        self.context = context
        self.policy = policy
        self.bad_steps = bad_steps
        self.evaluations = evaluations
        self.memory = memory
        spec = context.job.spec
        self.checkpointer = AsyncCheckpointer(
            context.directory, context.rank, context.world_size, spec.checkpoint, spec.training.evaluation.best, memory
        )
        self.last_commit = context.restore_from
        self.commit_seconds = context.task.commit_seconds
        self._restore: Restore | None = None
        self._memory_is_read = False  # by any rank, once all have checked it

    def reserve(self) -> None:
        """Reserve the host memory of the first copy, in the background."""
        self.checkpointer.reserve(zero_state.fragments_to_save(self.context.engine))

    def restore(self) -> None:
        """Load the checkpoint that this generation starts from, if there is one. All ranks call it together.

        Raises:
            CorruptCheckpointError: on all ranks, if one of them found a file that is missing or damaged.
        """
        name, engine, reporter = self.context.restore_from, self.context.engine, self.context.reporter
        if name is None:
            return
        folder = self.context.directory.checkpoints / str(name)
        if (bucket := bucket_of(self.context.directory)) is not None:
            fetch_manifest(bucket, folder)
        checkpoint = open_checkpoint(folder)
        restored = self._load(checkpoint)
        assert isinstance(checkpoint, Checkpoint), "an unusable one has been refused"
        manifest = checkpoint.manifest
        zero_state.set_optimizer_step(engine, manifest.optimizer_step, manifest.optimizer_scalars)
        if manifest.loss_scale is not None:
            zero_state.set_loss_scale(engine, manifest.loss_scale)
        zero_state.sync_model_from_masters(engine)
        skipped = name.step - manifest.optimizer_step
        self.bad_steps.restore(manifest.bad_steps, skipped)
        self.evaluations.restore(manifest.evaluations)
        reporter.update(skippedSteps=skipped)
        reporter.record_event(
            "restored",
            step=name.step,
            checkpoint=str(name),
            memoryBytes=restored.memory,
            peerBytes=restored.peer,
            volumeBytes=restored.volume,
        )
        reporter.record_startup("restore")

    def is_due(self, step: int) -> bool:
        """Whether to commit once `step` optimizer steps are done; decided on rank 0."""
        return self.policy.due(step) and not self.checkpointer.is_busy

    def _check_memory_of_all_ranks(self) -> None:
        """Wait until all ranks have checked their memory, before the first commit overwrites what others read."""
        self.check_memory()
        if self._memory_is_read:
            self._memory_is_read = False
            distributed.barrier(group=self.context.control)

    @property
    def is_pending(self) -> bool:
        """Whether a commit has started that is not durable yet."""
        return self.checkpointer.is_busy

    def commit(self, step: int) -> None:
        """Start to save the state after `step` optimizer steps. `finish_commit` must have been called before."""
        self._check_memory_of_all_ranks()
        engine, reporter = self.context.engine, self.context.reporter
        name = CheckpointName(step, self.context.task.generation)
        manifest = partial(
            self._manifest,
            step,
            optimizer_step=zero_state.optimizer_step(engine),
            bad_steps=self.bad_steps.in_a_row,
            loss_scale=zero_state.loss_scale(engine),
            evaluations=self.evaluations.history,
            optimizer_scalars=zero_state.optimizer_scalars(engine),
        )
        with reporter.stopwatch.measure(Part.CHECKPOINT_STALL):
            self.checkpointer.save(name, zero_state.fragments_to_save(engine), manifest)
        self.policy.commit_started()
        self.last_commit = name

    def poll(self) -> None:
        """Record the last commit if it has become durable since the last call. Does not wait.

        Raises:
            DamagedMemoryError: see `check_memory`.
        """
        if self._restore is not None and self._restore.is_computed:
            self.check_memory()
        self._record(self.checkpointer.poll())

    def check_memory(self) -> None:
        """Wait until it is known that what was restored from shared memory is what was committed.

        Raises:
            DamagedMemoryError: it is not. What this rank has trained since is void.
        """
        restore, self._restore = self._restore, None
        if restore is not None:
            restore.check_memory()

    def finish_commit(self) -> None:
        """Wait until no commit is pending.

        A volume that is slow or refuses writes is a known problem, not a hang: heartbeats go on while the commit
        progresses on any rank. Without any progress the watchdog ends the process.
        """
        reporter = self.context.reporter

        def report() -> None:
            reporter.update(checkpointProblem=self.checkpointer.problem)
            if self.checkpointer.has_progressed():
                reporter.heartbeat()
            else:
                reporter.write_if_due()

        with reporter.stopwatch.measure(Part.CHECKPOINT_STALL):
            self._record(self.checkpointer.wait(report))

    def abandon(self) -> None:
        """End the pending commit, if there is one: this rank leaves the generation."""
        self.checkpointer.abandon()

    def wait_for_staging(self) -> None:
        """Wait until the state has been copied. Call it before optimizer steps and evaluations, which overwrite it."""
        with self.context.reporter.stopwatch.measure(Part.CHECKPOINT_STALL):
            self.checkpointer.wait_for_staging()

    def _manifest(self, step: int, entries: tuple[FileEntry, ...], **at_that_step: Any) -> Manifest:
        """Manifest of a commit. Runs in a thread, once the files of all ranks are durable.

        Makes the step records durable first: a checkpoint must not survive without the records of its steps.
        """
        context = self.context
        context.reporter.sync()
        return Manifest(
            step=step,
            generation=context.task.generation,
            fingerprint=context.plan.fingerprint,
            plan_version=context.plan.version,
            world_size=context.world_size,
            zero_stage=context.plan.zero_stage,
            time=time.time(),
            files=entries,
            parameters=zero_state.parameter_shapes(context.engine),
            **at_that_step,
        )

    def _record(self, result: CommitResult | None) -> None:
        """Report a durable commit on rank 0, and any problem that delays the pending one."""
        reporter = self.context.reporter
        reporter.update(checkpointProblem=self.checkpointer.problem)
        if result is None or result.manifest is None:
            return
        self.policy.commit_finished(result.stall_seconds, result.seconds)
        self.commit_seconds = result.seconds
        reporter.update(lastCheckpoint={"step": result.name.step, "time": result.manifest.time})
        reporter.record_event("committed", **result.as_event())

    def _load(self, checkpoint: Checkpoint | UnusableCheckpoint) -> RestoredBytes:
        """Read this rank's fragments. The ranks share the work of verifying the files that any of them reads.

        Returns:
            How many bytes all ranks have read.

        Raises:
            CorruptCheckpointError: on all ranks.
        """
        context = self.context
        restore, problem, read = None, None, RestoredBytes()
        try:
            if isinstance(checkpoint, UnusableCheckpoint):
                problem = checkpoint.reason
            else:
                restore = Restore(checkpoint, zero_state.fragments_to_load(context.engine), self.memory)
        except CorruptCheckpointError as error:
            problem = error.reason
        files = sorted(set().union(*self._agree_on(problem, restore.volume_files if restore else set[str]())))
        assert restore is not None, "there is no problem"
        self._restore, self._memory_is_read = restore, context.task.memory_copies > 0
        try:
            read = restore.read(files[context.rank :: context.world_size])
        except CorruptCheckpointError as error:
            problem = error.reason
        return sum(self._agree_on(problem, read), RestoredBytes())

    def _agree_on(self, problem: str | None, value: T) -> list[T]:
        """Exchange a value; returns those of all ranks. Raises on all of them if one has found a problem."""
        found: list[tuple[str | None, T]] = [(None, value)] * self.context.world_size
        distributed.all_gather_object(found, (problem, value), group=self.context.control)
        problems = [problem for problem, _ in found if problem]
        if problems:
            raise CorruptCheckpointError(str(self.context.restore_from), problems[0])
        return [each for _, each in found]
