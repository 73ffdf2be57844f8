"""The train function of one GPU (or CPU slot): set up, restore, loop, evaluate, export."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from spotune.goodput import Part
from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.async_checkpointer import Committed, Committer
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, FileEntry, Manifest, open_checkpoint
from spotune_trainer.checkpoint.policy import CommitPolicy
from spotune_trainer.checkpoint.reader import CheckpointReader, CorruptCheckpointError, verify
from spotune_trainer.data.datasets import Datasets, open_datasets
from spotune_trainer.data.loader import MicroBatches, MicroBatchLoader
from spotune_trainer.engine import zero_state as fragments
from spotune_trainer.engine.build import EngineConfig, build_engine, learning_rate
from spotune_trainer.engine.compile.layers import WIDTH_MULTIPLE, CompileCache
from spotune_trainer.engine.determinism import any_kernels, use_deterministic_kernels
from spotune_trainer.engine.process_groups import outlast
from spotune_trainer.evaluation.metrics import build_metrics
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import Flags, NoticeWatch
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.models.flops import ModelShape, peak_flops
from spotune_trainer.models.lora import attach_adapter
from spotune_trainer.models.loss import weightless_batch
from spotune_trainer.models.packed_attention import attend_within_documents
from spotune_trainer.models.pretrained import DTYPES, build_model, build_unfilled, check_vocabulary, load_tokenizer
from spotune_trainer.observability.logs.line_format import logging_to
from spotune_trainer.observability.progress import Journal, Phase
from spotune_trainer.training.failures import describe, record_failure
from spotune_trainer.training.finalize import evaluate_now, finish
from spotune_trainer.training.flops_profiler import FlopsProfile
from spotune_trainer.training.loop import Speed, TrainingLoop
from spotune_trainer.training.task import Ending, WorkerTask

logger = logging.getLogger("spotune.worker")


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended; once trained, with the figures of the run (rank 0)."""

    ending: Ending
    figures: dict[str, Any]


class Worker:
    """One rank of one generation."""

    def __init__(self, task: WorkerTask, rank: int, world_size: int, journal: Journal) -> None:
        self.task = task
        self.job = FinetuneJob.model_validate(task.job)
        self.plan = RunPlan.from_json(task.plan)
        self.directory = JobDirectory(Path(task.directory))
        self.rank = rank
        self.world_size = world_size
        self.journal = journal
        self.policy = CommitPolicy(self.job.spec.checkpoint.every, world_size, task.seconds_to_preemption)
        self.committer = Committer(self.directory, rank, world_size, self.job.spec.checkpoint)
        self.notices = NoticeWatch([self.directory.notice, journal.logs.notice])
        self.commit_seconds = task.commit_seconds
        self.compile_cache = CompileCache(self.directory.compiled, writes=rank == 0)
        self.last_commit = CheckpointName.parse(task.restore) if task.restore else None
        self.first_step = self.last_commit.step if self.last_commit else 0

    def train(self) -> WorkerEnd:
        """Train to the end, or until told to end before it."""
        spent = self.journal.spent
        self.set_up()
        with spent.on(Part.RESTORE):
            self.restore()
        with spent.on(Part.PRODUCTIVE):
            ending = self.run_steps()
        with spent.on(Part.EVALUATION), any_kernels():
            return WorkerEnd(ending, finish(self) if ending is Ending.TRAINED else {})

    def set_up(self) -> None:
        """Process group, data, model and engine."""
        training = self.job.spec.training
        use_deterministic_kernels(wanted=self.job.spec.execution.deterministic)
        # Collectives on small host tensors, whatever the model's own backend is.
        self.control: Any = distributed.new_group(backend="gloo")
        outlast(self.job.spec.retry.hang_timeout.seconds, distributed.group.WORLD, self.control)
        build_metrics(training.evaluation)  # this node may hold other packages than the driver's
        self.datasets: Datasets = open_datasets(self.job, self.directory)
        self.journal.started("data")
        self.tokenizer = load_tokenizer(self.job)
        self.total_steps = self.datasets.schedule.total_steps(training.epochs, training.max_steps)
        self.loader = self._loader()
        self.loader.prefetch()
        # Beside an adapter the model's own weights are in no checkpoint.
        filled = self.task.restore and self.job.spec.adapter is None
        model = build_unfilled(self.job) if filled else build_model(self.job)
        if self.job.spec.execution.attention == "auto":
            attend_within_documents(model)
        check_vocabulary(model.config, self.tokenizer)
        shape = ModelShape.of(model, frozen=self.job.spec.adapter is not None)
        speed = Speed(shape, _peak_flops(self.job.spec.model.dtype))
        model = attach_adapter(model, self.job)
        self.journal.started("model")
        micro_batches = -(-training.global_batch_size // self.plan.micro_batch_size)
        config = EngineConfig(
            zero_stage=self.plan.zero_stage,
            micro_batch_size=self.plan.micro_batch_size,
            accumulation=-(-micro_batches // self.world_size),
            dtype=DTYPES[self.job.spec.model.dtype],
            gradient_checkpointing=self.plan.gradient_checkpointing,
            offload=self.job.spec.execution.offload,
            compile=self.plan.compile,
            gathered_layers=self.plan.gathered_layers,
            whole_gradients=self.plan.whole_gradients,
        )
        if self.plan.compile:
            self.compile_cache.load()
        self.engine = build_engine(model, training, config)
        outlast(self.job.spec.retry.hang_timeout.seconds, self.engine.data_parallel_group)
        self.engine.train()
        self.loop = TrainingLoop(
            engine=self.engine,
            task=self.job.spec.model.task,
            training=training,
            schedule=self.datasets.schedule,
            learning_rate=learning_rate(training, self.total_steps),
            total_steps=self.total_steps,
            accumulation=config.accumulation,
            generation=self.task.generation,
            journal=self.journal,
            speed=speed,
            control=self.control,
            before_update=self._protect_commit,
        )
        self.profile = FlopsProfile(self.directory, self.job.spec.execution.flops_profile, self.rank, self.control)
        self.committer.reserve(fragments.owned_fragments(self.engine))
        self.journal.started("engine")

    def restore(self) -> None:
        """Load the checkpoint that this generation starts from."""
        if self.task.restore is None:
            return
        checkpoint = open_checkpoint(self.directory.checkpoints / self.task.restore)
        problem = self._load(checkpoint) if isinstance(checkpoint, Checkpoint) else checkpoint.reason
        self._agree_on(problem)
        assert isinstance(checkpoint, Checkpoint)
        fragments.set_optimizer_step(self.engine, checkpoint.manifest.optimizer_step)
        if checkpoint.manifest.loss_scale is not None:
            fragments.set_loss_scale(self.engine, checkpoint.manifest.loss_scale)
        fragments.publish(self.engine)
        skipped = checkpoint.name.step - checkpoint.manifest.optimizer_step
        self.loop.bad_steps.restore(checkpoint.manifest.bad_steps, skipped)
        self.journal.set(skippedSteps=skipped)
        self.journal.event("restored", step=checkpoint.name.step, checkpoint=str(checkpoint.name))
        self.journal.started("restore")

    def final_checkpoint(self) -> CheckpointName:
        """The checkpoint of the last step: this generation's, or the one it was started from."""
        assert self.last_commit is not None
        return self.last_commit

    def release(self) -> None:
        """Give the engine's memory back; nothing but the export follows."""
        del self.engine, self.loop

    def run_steps(self) -> Ending:
        """Train from the first step to the last one or a notice. Who is told of training may rely on a step."""
        with closing(self._batches()) as batches:
            waited_for = self.journal.spent.each(Part.DATA_WAIT, batches)
            for step in self.loop.run(waited_for, self.first_step, self._ask):
                if step.number == self.first_step + 1:
                    self.journal.started("firstStep")
                    self._keep_compiled()
                    self.journal.enter(Phase.TRAINING)
                self._take_in(self.committer.poll())
                if step.flags.commit:
                    self.commit(step.number)
                if (step.flags.stop or step.flags.leave) and step.number < self.total_steps:
                    self.finish_commit()
                    self.loop.settle()
                    return Ending.STOPPED if step.flags.stop else Ending.LEFT
                self._evaluate_if_due(step.number)
        if self.last_commit is None or self.last_commit.step < self.total_steps:
            self.commit(self.total_steps)
        self.finish_commit()
        return Ending.TRAINED

    def commit(self, step: int) -> None:
        """Begin to save the state after `step` optimizer steps; the one before it is complete then."""
        self.finish_commit()
        self.loop.settle()
        name = CheckpointName(step, self.task.generation)
        manifest = partial(
            self._manifest,
            step,
            optimizer_step=fragments.optimizer_step(self.engine),
            bad_steps=self.loop.bad_steps.in_a_row,
            loss_scale=fragments.loss_scale(self.engine),
        )
        with self.journal.spent.on(Part.CHECKPOINT_STALL):
            self.committer.begin(name, fragments.owned_fragments(self.engine), manifest)
        self.policy.begun()
        self._keep_compiled()
        self.last_commit = name
        self.journal.beat()

    def finish_commit(self) -> None:
        """Wait until nothing is being saved any more.

        A volume that refuses, or is slow, is known and no hang; a rank of which nothing arrives there at all is one.
        """

        def say() -> None:
            self.journal.set(checkpointProblem=self.committer.problem)
            if self.committer.advances():
                self.journal.beat()
            else:
                self.journal.publish()

        with self.journal.spent.on(Part.CHECKPOINT_STALL):
            self._take_in(self.committer.wait(say))

    def _protect_commit(self) -> None:
        """Before an optimizer step: wait for the copy that a commit still takes."""
        with self.journal.spent.on(Part.CHECKPOINT_STALL):
            self.committer.protect()

    def _keep_compiled(self) -> None:
        if self.plan.compile:
            self.compile_cache.keep()

    def _batches(self) -> Generator[MicroBatches]:
        for step, micro_batches in enumerate(self.loader, start=self.first_step + 1):
            if self.profile.is_due(step):
                with self.journal.spent.on(Part.EVALUATION):
                    batch = micro_batches[0][1] if micro_batches else weightless_batch(self.job.spec.model.task)
                    self.profile.make(self.engine, batch.to(self.engine.device), step)
                self.journal.beat()
            yield micro_batches

    def _loader(self) -> MicroBatchLoader:
        return MicroBatchLoader(
            self.datasets.train,
            self.datasets.schedule,
            self.job.spec.model.task,
            self.tokenizer.pad_token_id,
            self.plan.micro_batch_size,
            self.rank,
            self.world_size,
            first_step=self.first_step,
            last_step=self.total_steps,
            width_multiple=WIDTH_MULTIPLE if self.plan.compile else 1,
        )

    def _ask(self, step: int) -> Flags:
        """What rank 0 wants once `step` steps are done; the others follow."""
        if self.rank != 0:
            return Flags()
        return Flags(commit=self.policy.due(step) and not self.committer.is_busy) | self.notices.flags(
            self.commit_seconds
        )

    def _evaluate_if_due(self, step: int) -> None:
        every = self.job.spec.training.evaluation.every_steps
        if every and step % every == 0 and step < self.total_steps:
            self.loop.settle()
            with self.journal.spent.on(Part.EVALUATION), any_kernels():
                evaluate_now(self, step)
            self.journal.enter(Phase.TRAINING)

    def _manifest(self, step: int, entries: tuple[FileEntry, ...], **at_that_step: Any) -> Manifest:
        """Called in a thread once the files of all ranks are durable; by then the steps have to be, too."""
        self.journal.sync()
        return Manifest(
            step=step,
            generation=self.task.generation,
            fingerprint=self.plan.fingerprint,
            plan_version=self.plan.version,
            world_size=self.world_size,
            zero_stage=self.plan.zero_stage,
            time=time.time(),
            files=entries,
            parameters=fragments.parameter_shapes(self.engine),
            **at_that_step,
        )

    def _take_in(self, ended: Committed | None) -> None:
        """Say on rank 0 what has been committed, and what keeps the next one from it."""
        self.journal.set(checkpointProblem=self.committer.problem)
        if ended is None or ended.manifest is None:
            return
        self.policy.committed(ended.stall_seconds, ended.seconds)
        self.commit_seconds = ended.seconds
        self.journal.set(lastCheckpoint={"step": ended.name.step, "time": ended.manifest.time})
        self.journal.event(
            "committed",
            step=ended.name.step,
            checkpoint=str(ended.name),
            seconds=round(ended.seconds, 3),
            stallSeconds=round(ended.stall_seconds, 4),
            bytes=sum(entry.size for entry in ended.manifest.files),
        )

    def _load(self, checkpoint: Checkpoint) -> str | None:
        """Verify this rank's share of the files, and read its fragments meanwhile; what is wrong, or None."""
        share = checkpoint.manifest.files[self.rank :: self.world_size]
        with ThreadPoolExecutor(1, thread_name_prefix="verify") as verifier:
            verified = verifier.submit(verify, checkpoint, share)
            try:
                CheckpointReader(checkpoint).restore(fragments.needed_fragments(self.engine))
                verified.result()
            except CorruptCheckpointError as error:
                return error.reason
        return None

    def _agree_on(self, problem: str | None) -> None:
        """All ranks refuse the checkpoint if one of them found a problem in it."""
        found: list[str | None] = [None] * self.world_size
        distributed.all_gather_object(found, problem, group=self.control)
        reasons = [reason for reason in found if reason]
        if reasons:
            assert self.task.restore is not None
            raise CorruptCheckpointError(self.task.restore, reasons[0])


def _peak_flops(dtype: str) -> float | None:
    return peak_flops(torch.cuda.get_device_name(), dtype) if torch.cuda.is_available() else None


def _join_group() -> None:
    """Begin the process group that the environment describes, as torchrun does."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def run_worker(task: WorkerTask, rank: int, world_size: int) -> WorkerEnd:
    """Train as `rank` of a process group; whatever goes wrong is written down before it is raised."""
    logs = task.logs
    job = FinetuneJob.model_validate(task.job)
    logs.root.mkdir(parents=True, exist_ok=True)
    with logging_to(logs.worker(rank)), Journal(logs, rank, job.spec.retry.hang_timeout.seconds) as journal:
        where = f"{socket.gethostname()}, process {os.getpid()}"
        start = task.restore or "the beginning"
        logger.info("rank %d of %d on %s: from %s", rank, world_size, where, start)
        try:
            if not distributed.is_initialized():
                _join_group()
            ended = Worker(task, rank, world_size, journal).train()
        except BaseException as error:
            logger.exception("rank %d ends", rank)
            record_failure(logs, describe(rank, error))
            raise
        logger.info("%s", ended.ending.value)
        return ended
