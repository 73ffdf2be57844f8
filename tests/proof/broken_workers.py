"""Workers with one defect each, as a bug in the trainer would cause; the checker has to find them.

Most of them train correctly until they start from a checkpoint.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from spotune_trainer.checkpoint import async_checkpointer, writer
from spotune_trainer.checkpoint.fragment import MASTER
from spotune_trainer.checkpoint.layout import (
    Checkpoint,
    CheckpointName,
    UnusableCheckpoint,
    file_label,
    open_checkpoint,
)
from spotune_trainer.checkpoint.memory.peer_connection import PeerConnection
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment
from spotune_trainer.checkpoint.reader import CheckpointReader
from spotune_trainer.checkpoint.restore import RestoredBytes
from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.data.mixture_schedule import MixtureSchedule
from spotune_trainer.data.schedule import SampleIds, SampleSchedule
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.engine import zero_state
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.heads import head_modules
from spotune_trainer.models.pretrained import build_model
from spotune_trainer.training import finalize
from spotune_trainer.training.context import TrainContext, build_loader
from spotune_trainer.training.worker import Worker
from tests.trainer.support.peers import nodes

_FENCE = "raise_if_superseded"


class _ShiftedSchedule(SampleSchedule):
    """Every epoch begins with its second sample and ends with its first."""

    def epoch_order(self, epoch: int) -> SampleIds:
        return np.roll(super().epoch_order(epoch), -1)


def _with_loader(context: TrainContext, first_step: int) -> TrainContext:
    """The context with a loader that begins at another step."""
    loader = build_loader(
        context.job,
        context.plan,
        context.datasets,
        context.references,
        context.tokenizer,
        context.rank,
        context.world_size,
        first_step,
        context.total_steps,
    )
    return replace(context, loader=loader)


class _MixtureWorker(Worker):
    """Replaces the schedule of a mixture after a restart."""

    def set_up(self) -> None:
        super().set_up()
        schedule = self.context.datasets.schedule
        assert isinstance(schedule, MixtureSchedule)
        if self.task.restore is not None:
            broken = copy.copy(schedule)
            self.break_schedule(broken)
            datasets = replace(self.context.datasets, schedule=broken)
            self.context = _with_loader(replace(self.context, datasets=datasets), self.context.first_step)

    def break_schedule(self, schedule: MixtureSchedule) -> None:
        """Change the schedule."""
        raise NotImplementedError


class DrawTooFar(_MixtureWorker):
    """Goes on one draw too far in the first source of the mixture, and right in the others."""

    def break_schedule(self, schedule: MixtureSchedule) -> None:
        ids_of_draws = schedule._ids_of_draws
        schedule._ids_of_draws = (  # type: ignore[method-assign]
            lambda source, draws: ids_of_draws(source, draws + (source == 0))
        )


class MixtureFromRestart(_MixtureWorker):
    """Counts the steps of the mixture from its own start, as a loader without a saved state would."""

    def break_schedule(self, schedule: MixtureSchedule) -> None:
        sample_ids, first_step = schedule.sample_ids, self.context.first_step
        schedule.sample_ids = lambda step: sample_ids(step - first_step)  # type: ignore[method-assign]


class StageMissed(_MixtureWorker):
    """Stays with the sources of the step that it starts with."""

    def break_schedule(self, schedule: MixtureSchedule) -> None:
        plan, stage = copy.copy(schedule.plan), schedule.plan.stage_of(self.context.first_step)
        plan.stage_of = lambda step: stage  # type: ignore[method-assign]
        schedule.plan = plan


class SampleTooFar(Worker):
    """Goes on one sample too far."""

    def set_up(self) -> None:
        super().set_up()
        training, train = self.job.spec.training, self.context.datasets.train
        if self.task.restore is not None:
            assert isinstance(train, ShardedDataset)
            shifted = _ShiftedSchedule(train.shard_sizes, training.global_batch_size, training.seed)
            datasets = replace(self.context.datasets, schedule=shifted)
            self.context = _with_loader(replace(self.context, datasets=datasets), self.context.first_step)


class StepTooFar(Worker):
    """Goes on with the samples of the step after the next."""

    def set_up(self) -> None:
        super().set_up()
        if self.task.restore is not None:
            self.context = _with_loader(self.context, self.context.first_step + 1)


class FirstMomentForgotten(Worker):
    """Leaves Adam's mean of the gradients of one parameter at zero."""

    state = "exp_avg"

    def restore(self) -> None:
        super().restore()
        if self.task.restore is None:
            return
        parameter = min(zero_state.parameter_shapes(self.context.engine))
        for fragment in zero_state.fragments_to_load(self.context.engine):
            if fragment.parameter == parameter:
                fragment.states[self.state].zero_()


class SecondMomentForgotten(FirstMomentForgotten):
    """Leaves Adam's mean of the squared gradients of one parameter at zero."""

    state = "exp_avg_sq"


class OptimizerStepForgotten(Worker):
    """Corrects Adam's bias as if the first step were to come."""

    def restore(self) -> None:
        super().restore()
        if self.task.restore is not None:
            zero_state.set_optimizer_step(self.context.engine, 0)


class RateFromRestart(Worker):
    """Counts the steps of the learning rate from its own start."""

    def run_steps(self) -> Any:
        rate = self.loop.learning_rate
        self.loop.learning_rate = lambda step: rate(step - self.context.first_step)
        return super().run_steps()


class TrustingWorker(Worker):
    """Believes that a checkpoint holds what its manifest says."""

    def restore(self) -> None:
        def load_unverified(checkpoint: Checkpoint | UnusableCheckpoint) -> RestoredBytes:
            assert isinstance(checkpoint, Checkpoint)
            CheckpointReader(checkpoint).restore(zero_state.fragments_to_load(self.context.engine))
            return RestoredBytes()

        self.checkpointing._load = load_unverified  # type: ignore[method-assign]
        super().restore()


class PeerTrustingWorker(Worker):
    """Believes that another node has in memory what it says: the bytes of an earlier commit, in this case."""

    def restore(self) -> None:
        checkpoint = open_checkpoint(self.task.job_directory.checkpoints / str(self.task.restore))
        assert isinstance(checkpoint, Checkpoint)
        with nodes(2) as (peer, own):
            (memory,) = own.begin(self.task.generation, None, peer)
            held = peer.begin(self.task.generation, ranks=len(checkpoint.manifest.files))
            for file, entry in zip(held, checkpoint.manifest.files, strict=True):
                segment = file.begin(entry.size)
                with segment.map() as mapped:
                    mapped[LABEL_BYTES:] = (stale_copies(self.task.job_directory) / entry.name).read_bytes()
                file.complete(segment, file_label(checkpoint.name, entry))
            self.checkpointing.memory = memory
            with mock.patch.object(PeerConnection, "receive_content", _receive_unverified):
                super().restore()


def stale_copies(directory: JobDirectory) -> Path:
    """Where a control puts the files of an earlier commit, which another node passes off as those of the last one."""
    return directory.root / "stale"


def _receive_unverified(connection: PeerConnection, segment: Segment, label: Label) -> None:
    with segment.map() as mapped:
        mapped[LABEL_BYTES:] = connection.receive_bytes(label.size)


class DropoutByRank(Worker):
    """Draws dropout by the number of a micro-batch within its rank, not within the step: as ranks of their own do."""

    def batches(self) -> Generator[MicroBatches]:
        for batches in super().batches():
            yield [(index, batch) for index, (_, batch) in enumerate(batches)]


class MicroBatchLost(Worker):
    """Drops the last rank's last micro-batch of every step, as padding by the wrong count would."""

    def batches(self) -> Generator[MicroBatches]:
        for batches in super().batches():
            last = self.task.restore is not None and self.rank == self.world_size - 1
            yield batches[:-1] if last else batches


class OldExport(Worker):
    """Exports the checkpoint that it started from."""

    def final_checkpoint(self) -> CheckpointName:
        assert self.task.restore is not None
        return CheckpointName.parse(self.task.restore)


class Unfenced(Worker):
    """Does not look whether a later generation has started: before it commits, when it prunes, before it exports."""

    def train(self) -> Any:
        for module, name in ((async_checkpointer, _FENCE), (finalize, _FENCE), (writer, "in_lineage")):
            assert hasattr(module, name), "the fence is elsewhere by now"
            setattr(module, name, _let_pass)
        return super().train()


def _let_pass(*_: object) -> bool:
    """In the place of the fence, in this process alone."""
    return True


class TrainedReference(Worker):
    """Computes the log-probabilities of the reference model again at a restart, with the trained weights."""

    def compute_references(self) -> None:
        if self.task.restore is not None:
            if self.rank == 0:
                shutil.rmtree(self.context.directory.reference)
            begun = replace(self.task, restore=None)
            self.context = replace(self.context, task=begun)
            super().compute_references()
            self.context = replace(self.context, task=self.task)
        else:
            super().compute_references()


class HeadLeftOut(Worker):
    """Goes on with the head of the first step, as if a checkpoint held the base model alone."""

    seeds_further = 0

    def restore(self) -> None:
        super().restore()
        if self.task.restore is None:
            return
        spec = self.job.spec
        training = spec.training.model_copy(update={"seed": spec.training.seed + self.seeds_further})
        first = build_model(self.job.model_copy(update={"spec": spec.model_copy(update={"training": training})}))
        weights, heads = first.state_dict(), tuple(f"{name}." for name in head_modules(first))
        for fragment in zero_state.fragments_to_load(self.context.engine):
            if fragment.parameter.startswith(heads):
                for name, state in fragment.states.items():
                    state.zero_()
                    if name == MASTER:
                        state.add_(weights[fragment.parameter].flatten()[fragment.offset :][: state.numel()])
        zero_state.sync_model_from_masters(self.context.engine)


class HeadDrawnAgain(HeadLeftOut):
    """Draws the head from another seed at a restart."""

    seeds_further = 1
