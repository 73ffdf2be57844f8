"""Workers that break the promise in one place, each as a fault of the trainer would: what the proof has to find.

All but the two that know no restart train rightly until they start from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np

from spotune_trainer.checkpoint import async_checkpointer as committer
from spotune_trainer.checkpoint import writer
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.checkpoint.reader import CheckpointReader
from spotune_trainer.data.loader import MicroBatches, MicroBatchLoader
from spotune_trainer.data.schedule import SampleIds, SampleSchedule
from spotune_trainer.engine import zero_state as fragments
from spotune_trainer.training import finalize as finish
from spotune_trainer.training.worker import Worker

_FENCE = "refuse_superseded"


class _ShiftedSchedule(SampleSchedule):
    """Every epoch begins with its second sample and ends with its first."""

    def order(self, epoch: int) -> SampleIds:
        return np.roll(super().order(epoch), -1)


class SampleTooFar(Worker):
    """Goes on one sample too far."""

    def set_up(self) -> None:
        super().set_up()
        training, train = self.job.spec.training, self.datasets.train
        if self.task.restore is not None:
            shifted = _ShiftedSchedule(train.shard_sizes, training.global_batch_size, training.seed)
            self.datasets = replace(self.datasets, schedule=shifted)
            self.loader = self._loader()


class StepTooFar(Worker):
    """Goes on with the samples of the step after the next."""

    def _loader(self) -> MicroBatchLoader:
        begins = self.first_step
        if self.task.restore is not None:
            self.first_step += 1
        loader = super()._loader()
        self.first_step = begins
        return loader


class FirstMomentForgotten(Worker):
    """Leaves Adam's mean of the gradients of one parameter at zero."""

    state = "exp_avg"

    def _load(self, checkpoint: Checkpoint) -> str | None:
        problem = super()._load(checkpoint)
        parameter = min(checkpoint.manifest.parameters)
        for fragment in fragments.needed_fragments(self.engine):
            if fragment.parameter == parameter:
                fragment.states[self.state].zero_()
        return problem


class SecondMomentForgotten(FirstMomentForgotten):
    """Leaves Adam's mean of the squared gradients of one parameter at zero."""

    state = "exp_avg_sq"


class OptimizerStepForgotten(Worker):
    """Corrects Adam's bias as if the first step were to come."""

    def restore(self) -> None:
        super().restore()
        if self.task.restore is not None:
            fragments.set_optimizer_step(self.engine, 0)


class RateFromRestart(Worker):
    """Counts the steps of the learning rate from its own start."""

    def run_steps(self) -> Any:
        rate = self.loop.learning_rate
        self.loop.learning_rate = lambda step: rate(step - self.first_step)
        return super().run_steps()


class TrustingWorker(Worker):
    """Believes that a checkpoint holds what its manifest says."""

    def _load(self, checkpoint: Checkpoint) -> str | None:
        CheckpointReader(checkpoint).restore(fragments.needed_fragments(self.engine))
        return None


class DropoutByRank(Worker):
    """Draws dropout by the number of a micro-batch within its rank, not within the step: as ranks of their own do."""

    def _batches(self) -> Generator[MicroBatches]:
        for batches in super()._batches():
            yield [(index, batch) for index, (_, batch) in enumerate(batches)]


class MicroBatchLost(Worker):
    """Drops the last rank's last micro-batch of every step, as padding by the wrong count would."""

    def _batches(self) -> Generator[MicroBatches]:
        for batches in super()._batches():
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
        for module, name in ((committer, _FENCE), (finish, _FENCE), (writer, "in_lineage")):
            assert hasattr(module, name), "the fence is elsewhere by now"
            setattr(module, name, _let_pass)
        return super().train()


def _let_pass(*_: object) -> bool:
    """In the place of the fence, in this process alone."""
    return True
