"""The training of one rank: set up, restore, train steps, commit, finalize."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Generator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed

from spotune.errors import JobError
from spotune.goodput import Part
from spotune.job import FinetuneJob
from spotune_trainer.bucket.folders import pull_folder, pull_for_ranks, push_folder
from spotune_trainer.bucket.generation_logs import GenerationLogUpload
from spotune_trainer.bucket.link import bucket_of, link_of
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.policy import CommitPolicy
from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.engine.determinism import allow_nondeterministic_kernels
from spotune_trainer.engine.teardown import aborted
from spotune_trainer.evaluation.ranks import RankGroup
from spotune_trainer.evaluation.reference import compute_reference
from spotune_trainer.job_directory.notice import Flags, NoticeWatch
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.models.loss import zero_weight_batch
from spotune_trainer.observability.logs.line_format import logging_to_file
from spotune_trainer.observability.progress import ProgressReporter
from spotune_trainer.training.checkpointing import Checkpointing
from spotune_trainer.training.context import TrainContext, build_context
from spotune_trainer.training.evaluations import Evaluations
from spotune_trainer.training.failures import describe, record_failure
from spotune_trainer.training.finalize import finalize, run_evaluation, run_tasks
from spotune_trainer.training.flops_profiler import FlopsProfile
from spotune_trainer.training.loop import TrainingLoop
from spotune_trainer.training.nonfinite_steps import BadSteps
from spotune_trainer.training.task import RankExit, WorkerTask

logger = logging.getLogger("spotune.worker")

_RENDEZVOUS_SECONDS = 10.0
"""How long a rank looks for rank 0 by itself. Then PyTorch does, until its own timeout."""


@dataclass(frozen=True)
class TrainResult:
    """How the training of a rank ended.

    Attributes:
        exit: trained, stopped or yielded.
        summary: of the run, complete on rank 0; empty unless trained.
    """

    exit: RankExit
    summary: dict[str, Any]


class Worker:
    """One rank of one generation.

    Args:
        task: what the driver asks of the generation.
        rank: of this process, 0-based.
        world_size: number of ranks.
        reporter: writes progress, step records and events.
        memory: shared memory of the node for snapshots of commits; None without.
    """

    context: TrainContext
    evaluations: Evaluations
    checkpointing: Checkpointing
    loop: TrainingLoop
    profile: FlopsProfile

    def __init__(
        self,
        task: WorkerTask,
        rank: int,
        world_size: int,
        reporter: ProgressReporter,
        memory: RankMemory | None = None,
    ) -> None:
        self.task = task
        self.job = FinetuneJob.model_validate(task.job)
        self.rank = rank
        self.world_size = world_size
        self.reporter = reporter
        self.memory = memory
        self.policy = CommitPolicy(self.job.spec.checkpoint.every, world_size, task.seconds_to_preemption)
        read_by_rank_0 = [task.job_directory.notice, reporter.logs.notice]
        self.notices = NoticeWatch([*(read_by_rank_0 if rank == 0 else []), reporter.logs.agent_notice])
        link = link_of(task.job_directory)
        self._has_own_directory = link is not None and link.is_of_a_node
        self._reads_notices = rank == 0 or (self._has_own_directory and os.environ.get("LOCAL_RANK") == "0")

    def train(self) -> TrainResult:
        """Train to the last step, until training stops early, or until a notice asks the group to stop or to yield."""
        measure = self.reporter.stopwatch.measure
        self.set_up()
        with measure(Part.RESTORE):
            self.restore()
        with measure(Part.EVALUATION):
            self.compute_references()
        with measure(Part.PRODUCTIVE):
            rank_exit = self.run_steps()
        if rank_exit is not RankExit.TRAINED:
            return TrainResult(rank_exit, {})
        with measure(Part.EVALUATION), allow_nondeterministic_kernels():
            summary = finalize(self.context, self.final_checkpoint(), self.evaluations, self.release)
            return TrainResult(rank_exit, summary)

    def set_up(self) -> None:
        """Build data, model and engine, and what works on them: checkpointing, training loop, profiler."""
        if self.memory is not None and self.task.restore is not None:
            self.memory.begin_to_verify(self.task.restore)
        self._download_data()
        self.context = context = build_context(self.task, self.job, self.rank, self.world_size, self.reporter)
        bad_steps = BadSteps(self.job.spec.training.max_bad_steps, loss_is_scaled=context.engine.fp16_enabled())
        self.evaluations = Evaluations(context, partial(run_evaluation, context), partial(run_tasks, context))
        self.checkpointing = Checkpointing(context, self.policy, bad_steps, self.evaluations, self.memory)
        self.loop = TrainingLoop(context, bad_steps, before_update=self.checkpointing.wait_for_staging)
        self.profile = FlopsProfile(
            context.directory, self.job.spec.execution.flops_profile, self.rank, context.control
        )
        self.reporter.record_startup("engine")

    def restore(self) -> None:
        """Load the checkpoint that this generation starts from, if there is one."""
        self.checkpointing.restore()

    def compute_references(self) -> None:
        """Compute the reference model's log-probabilities of pairs that do not exist yet, if the objective needs them.

        Raises:
            JobError: some are missing, but the model has been trained already.
        """
        context = self.context
        references, datasets = context.references, context.datasets
        ranks = RankGroup(self.rank, self.world_size, context.control)
        for dataset, store in ((datasets.train, references.train), (datasets.evaluation, references.evaluation)):
            if dataset is None or store is None:
                continue
            missing, *_ = ranks.gather(store.missing())  # a network volume may show different files to each rank
            if not missing:
                continue
            if context.first_step > 0:
                raise JobError(
                    f"{context.directory.reference} lacks log-probabilities of the reference model, which were "
                    "computed before the first step: restore the folder, or start the job anew in another directory"
                )
            compute_reference(
                context.engine.module,
                dataset,
                store,
                missing,
                context.tokenizer.pad_token_id,
                context.plan.micro_batch_size,
                ranks,
                self.reporter.heartbeat,
            )
            self._share_references(ranks)
            self.reporter.record_startup("reference")

    def _download_data(self) -> None:
        """With a bucket, on a node with a directory of its own: have what earlier generations have made."""
        directory = self.task.job_directory
        if self._has_own_directory and (bucket := bucket_of(directory)) is not None:
            pull_for_ranks(bucket, directory, self.reporter.heartbeat)
            self.reporter.record_startup("download")

    def _share_references(self, ranks: RankGroup) -> None:
        """With a bucket: upload what this rank has computed, and download what the ranks on other machines have."""
        directory = self.context.directory
        if (bucket := bucket_of(directory)) is not None:
            push_folder(bucket, directory, directory.reference)
            ranks.gather(None)
            pull_folder(bucket, directory, directory.reference)

    def run_steps(self) -> RankExit:
        """Train from the first step to the last one, or until a notice; commit and evaluate in between.

        Training stops early after an evaluation, also after one that an earlier worker group made.
        """
        first_step, total_steps = self.context.first_step, self.context.total_steps
        if self._evaluate_if_due(first_step):  # the group that made this checkpoint ended before its evaluation
            self.reporter.record_startup("evaluation")
        last_step = first_step if self.evaluations.stops_early() else self._run_loop(first_step, total_steps)
        if isinstance(last_step, RankExit):
            return last_step
        if self.checkpointing.last_commit is None or self.checkpointing.last_commit.step < last_step:
            self.commit(last_step)
        self.checkpointing.finish_commit()
        return RankExit.TRAINED

    def _run_loop(self, first_step: int, total_steps: int) -> int | RankExit:
        """Train after `first_step`; returns the last step, or why the group ends before it."""
        with closing(self.batches()) as batches:
            timed_batches = self.reporter.stopwatch.measure_each(Part.DATA_WAIT, batches)
            for step in self.loop.run(timed_batches, first_step, self.propose_flags):
                if step.number == first_step + 1:
                    self.reporter.record_startup("firstStep")
                    if self.context.compiled is not None:
                        self.context.compiled.record_first_step()
                    self._save_compiled()
                    self.checkpointing.reserve()  # not before: while pages are locked, all that allocates waits
                    self.reporter.set_phase(Phase.TRAINING)
                self.checkpointing.poll()
                if step.flags.commit:
                    self.commit(step.number)
                if (step.flags.stop or step.flags.leave) and step.number < total_steps:
                    self.checkpointing.finish_commit()
                    self.loop.log_pending_step()
                    return RankExit.STOPPED if step.flags.stop else RankExit.YIELDED
                if self._evaluate_if_due(step.number) and self.evaluations.stops_early():
                    return step.number
        return total_steps

    def batches(self) -> Generator[MicroBatches]:
        """This rank's micro-batches of each step. Profiles the model before the step that the job asks for."""
        for step, micro_batches in enumerate(self.context.loader, start=self.context.first_step + 1):
            if self.profile.is_due(step):
                with self.reporter.stopwatch.measure(Part.EVALUATION):
                    batch = micro_batches[0][1] if micro_batches else zero_weight_batch(self.job.spec.model.task)
                    batch = batch.to(self.context.engine.device)
                    self.profile.make(self.context.engine, batch, step, self.loop.objective.forward)
                self.reporter.heartbeat()
            yield micro_batches

    def propose_flags(self, step: int) -> Flags:
        """What this rank proposes to do once `step` steps are done: commit, stop or leave.

        Rank 0 proposes for all. Where a node has a directory of its own, its first rank reads the notice of its agent:
        without a driver nobody else learns that the node's pod ends.
        """
        if not self._reads_notices:
            return Flags()
        commits = self.checkpointing
        is_due, is_pending = commits.is_due(step), commits.is_pending
        noticed = self.notices.flags(commits.commit_seconds, is_due=is_due, is_pending=is_pending)
        return Flags(commit=is_due) | noticed if self.rank == 0 else noticed

    def commit(self, step: int) -> None:
        """Start to commit the state after `step` optimizer steps, once the commit before it is complete."""
        self.checkpointing.finish_commit()
        self.loop.log_pending_step()
        self.checkpointing.commit(step)
        self._save_compiled()
        self.reporter.heartbeat()

    def final_checkpoint(self) -> CheckpointName:
        """The checkpoint of the last step."""
        assert self.checkpointing.last_commit is not None
        return self.checkpointing.last_commit

    def release(self) -> None:
        """Free the engine's memory for the export, which reads the model from the final checkpoint."""
        self.context.release_engine()
        del self.loop

    def leave(self) -> None:
        """End what goes on in the background, because training has failed."""
        if hasattr(self, "checkpointing"):
            self.checkpointing.abandon()
        if hasattr(self, "context"):
            for dataset in (self.context.datasets.train, self.context.datasets.evaluation):
                if dataset is not None:
                    dataset.close(wait=False)

    def _save_compiled(self) -> None:
        if self.context.compiled is not None:
            self.context.compiled.save()

    def _evaluate_if_due(self, step: int) -> bool:
        """Evaluate if the job asks for it after `step`; commit if no earlier evaluation is better."""
        if not self.evaluations.is_due(step):
            return False
        self.loop.log_pending_step()
        self.checkpointing.check_memory()
        self.checkpointing.wait_for_staging()  # the weights that are evaluated may replace those that are being copied
        with self.reporter.stopwatch.measure(Part.EVALUATION), allow_nondeterministic_kernels():
            self.evaluations.evaluate(step)
        last_commit = self.checkpointing.last_commit
        if self.evaluations.is_best(step) and (last_commit is None or last_commit.step < step):
            self.commit(step)
        self.reporter.set_phase(Phase.TRAINING)
        return True


def run_worker(task: WorkerTask, rank: int, world_size: int, memory: RankMemory | None = None) -> TrainResult:
    """Train as `rank` of a process group. An exception is logged and recorded in the failure file, then raised."""
    logs, directory = task.logs, task.job_directory
    job = FinetuneJob.model_validate(task.job)
    logs.root.mkdir(parents=True, exist_ok=True)
    bucket = bucket_of(directory)
    upload = GenerationLogUpload.of_rank(bucket, directory, logs, rank) if bucket is not None else None
    with (
        upload or nullcontext(),
        logging_to_file(logs.worker(rank)),
        ProgressReporter(logs, rank, job.spec.retry.hang_timeout.seconds, upload=upload) as reporter,
    ):
        process = f"{socket.gethostname()}, process {os.getpid()}"
        start = task.restore or "the beginning"
        logger.info("rank %d of %d on %s: starts from %s", rank, world_size, process, start)
        worker: Worker | None = None
        try:
            if not distributed.is_initialized():
                _init_process_group()
            worker = Worker(task, rank, world_size, reporter, memory)
            result = worker.train()
        except BaseException as error:
            logger.exception("rank %d failed", rank)
            record_failure(logs, describe(rank, error))
            if worker is not None:
                worker.leave()
            raise
        logger.info("rank %d ends: %s", rank, result.exit.value)
        return result


def _init_process_group() -> None:
    """Join the process group that the environment describes, as torchrun does."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if os.environ["RANK"] != "0":
        wait_for_rendezvous(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def wait_for_rendezvous(address: str, port: int) -> None:
    """Wait until rank 0 listens. PyTorch would wait, too, but half a second and more between two attempts."""
    until = time.monotonic() + _RENDEZVOUS_SECONDS
    family = socket.getaddrinfo(address, port)[0][0]
    while time.monotonic() < until:
        if aborted.is_set():
            raise ConnectionAbortedError("another rank was lost before the group had met")
        with suppress(OSError), socket.socket(family) as probe:
            probe.settimeout(_RENDEZVOUS_SECONDS)
            probe.bind(("", 0))
            if probe.getsockname()[1] != port:  # it would connect to itself, and rank 0 could not listen there
                probe.connect((address, port))
                return
        time.sleep(0.01)
