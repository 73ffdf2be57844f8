"""The training loop: micro-batches, loss over the step's tokens, backward, clip, step; and what all ranks agree on.

Every step has one small all-reduce. It carries the step's token count and the flags (commit, notice, stop, leave), so
that all ranks act at the same step, and the outcome of the step before (loss, row hash), so that no second one is
needed. The host waits for that outcome, and so for the device, only once the next forward pass is on its way.
Micro-batch g of a step goes to rank g mod world size; ranks without one run a weightless batch. Dropout is seeded from
(seed, step, g) and the learning rate is a function of the step: nothing random or scheduled needs saving.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor, distributed

from spotune.errors import JobError
from spotune.job import TrainingSpec
from spotune_trainer.data.batches import Batch, Task, combine_hashes
from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.data.schedule import SampleSchedule
from spotune_trainer.engine.build import LearningRate, gradient_norm_before_update, set_learning_rate
from spotune_trainer.job_directory.notice import Flags
from spotune_trainer.models.flops import ModelShape, mfu
from spotune_trainer.models.loss import summed_loss, weightless_batch
from spotune_trainer.observability.progress import Journal, StepRecord
from spotune_trainer.training.nonfinite_steps import BadSteps, spoiled_by

_WORD = 1 << 32


@dataclass
class Outcome:
    """This rank's share of one step's outcome.

    Attributes:
        step: optimizer steps done after it.
        learning_rate: rate of the step.
        tokens: label tokens of the step, over all ranks.
        samples: samples of the step, over all ranks.
        loss_sum: summed loss of this rank's rows, fp64, on the device until the next step asks for it.
        row_hash: combined hash of the rows that went through backward.
        flops: floating-point operations of this rank's rows by the formula of MFU.
        grad_norm: norm of the gradient before clipping, the same on all ranks; None where it is not computed.
        seconds: wall time of the step.
        productive_seconds: of these, those that went into the step itself.
    """

    step: int
    learning_rate: float
    tokens: int
    samples: int
    loss_sum: Tensor
    row_hash: int = 0
    flops: float = 0.0
    grad_norm: Any = None
    seconds: float = 0.0
    productive_seconds: float = 0.0


@dataclass(frozen=True)
class Step:
    """A finished optimizer step and what the ranks agreed on before it."""

    number: int
    flags: Flags


class Speed:
    """Turns rows and seconds into model FLOPs utilisation, for one kind of model on one kind of device."""

    def __init__(self, shape: ModelShape, peak_flops: float | None) -> None:
        self._shape = shape
        self._peak = peak_flops

    def flops(self, batch: Batch) -> float:
        """Floating-point operations of forward and backward for one batch, its padding not counted."""
        lengths, labels = batch.input_lengths, batch.label_lengths
        return self._shape.flops(len(lengths), float(lengths.mean()), float(labels.mean()))

    def utilisation(self, flops: float, seconds: float, world_size: int) -> float | None:
        """Part of the devices' peak that was used; None where the peak is not known, as on any CPU."""
        used = mfu(flops, seconds, world_size, self._peak)
        return None if used is None else round(used, 4)


class TrainingLoop:
    """Runs optimizer steps of one engine on one rank."""

    def __init__(
        self,
        *,
        engine: Any,
        task: Task,
        training: TrainingSpec,
        schedule: SampleSchedule,
        learning_rate: LearningRate,
        total_steps: int,
        accumulation: int,
        generation: int,
        journal: Journal,
        speed: Speed,
        control: Any,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.training = training
        self.schedule = schedule
        self.learning_rate = learning_rate
        self.total_steps = total_steps
        self.accumulation = accumulation
        self.generation = generation
        self.journal = journal
        self.speed = speed
        self.control = control
        self.before_update = before_update
        self.world_size = distributed.get_world_size(control)
        self.bad_steps = BadSteps(training.max_bad_steps, loss_is_scaled=engine.fp16_enabled())
        self._weightless = weightless_batch(task).to(engine.device)
        self._pending: Outcome | None = None

    def run(self, batches: Iterable[MicroBatches], first_step: int, ask: Callable[[int], Flags]) -> Iterator[Step]:
        """Train on each step's micro-batches, yielding after each one.

        Args:
            batches: this rank's micro-batches, one list for each step.
            first_step: optimizer steps done before.
            ask: what this rank wants done after the step of that number; rank 0 decides about commits.
        """
        started = time.monotonic()
        for step, micro_batches in enumerate(batches, start=first_step):
            # The device is to have work while the ranks agree.
            first_loss = self._forward(step, micro_batches, 0)
            tokens, flags = self._agree(step, micro_batches, ask(step + 1))
            outcome = self._train(step, micro_batches, tokens, first_loss)
            now = time.monotonic()
            outcome.seconds, started = now - started, now
            outcome.productive_seconds = self.journal.spent.lap()
            self._pending = outcome
            yield Step(step + 1, flags)

    def settle(self) -> None:
        """Log the last step now instead of with the next one: before a commit, an evaluation, the end."""
        if self._pending is not None:
            self._exchange(0, Flags())

    def _forward(self, step: int, micro_batches: MicroBatches, index: int) -> Tensor:
        """Summed loss of this rank's micro-batch of that index, or of a weightless one where it has none."""
        if index >= len(micro_batches):
            return summed_loss(self.engine, self._weightless)
        g, batch = micro_batches[index]
        torch.manual_seed(_seed(self.training.seed, step, g))
        return summed_loss(self.engine, batch.to(self.engine.device), self.training.label_smoothing)

    def _train(self, step: int, micro_batches: MicroBatches, tokens: int, loss: Tensor) -> Outcome:
        rate = self.learning_rate(step)
        set_learning_rate(self.engine, rate)
        nothing = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        outcome = Outcome(step + 1, rate, tokens, self.schedule.sample_ids(step).size, nothing)
        weight = self.world_size / tokens
        for index in range(self.accumulation):
            if index > 0:
                loss = self._forward(step, micro_batches, index)
            if index < len(micro_batches):
                batch = micro_batches[index][1]
                self.engine.backward(loss * spoiled_by(loss, weight), scale_wrt_gas=False)
                outcome.loss_sum += loss.detach()
                outcome.row_hash = combine_hashes([outcome.row_hash, *batch.row_hashes()])
                outcome.flops += self.speed.flops(batch)
            else:
                self.engine.backward(loss * 0.0, scale_wrt_gas=False)
            if index == self.accumulation - 1:
                outcome.grad_norm = gradient_norm_before_update(self.engine)
                self.before_update()
            self.engine.step()
            self.journal.beat()
        if outcome.grad_norm is None:
            outcome.grad_norm = self.engine.get_global_grad_norm()
        return outcome

    def _agree(self, step: int, micro_batches: MicroBatches, wanted: Flags) -> tuple[int, Flags]:
        """Token count of the whole step and the flags of all ranks."""
        tokens, flags = self._exchange(sum(batch.tokens for _, batch in micro_batches), wanted)
        if tokens == 0:
            raise JobError(
                f"dataset: no row of step {step + 1} has a label token (samples {self._samples(step)}); "
                "completions are empty or cut away by dataset.maxLength"
            )
        return tokens, flags

    def _exchange(self, tokens: int, wanted: Flags) -> tuple[int, Flags]:
        last = self._pending
        mine = torch.tensor(
            [
                tokens,
                wanted.commit,
                wanted.notice,
                wanted.stop,
                wanted.leave,
                last.loss_sum.item() if last else 0.0,
                # Two halves, each exact in a double whatever the world size.
                last.row_hash % _WORD if last else 0,
                last.row_hash >> 32 if last else 0,
                last.flops if last else 0.0,
            ],
            dtype=torch.float64,
        )
        distributed.all_reduce(mine, group=self.control)
        total, commit, notice, stop, leave, loss_sum, low, high, flops = mine.tolist()
        self._pending = None
        if last is not None:
            last.flops = flops
            self._log(last, loss_sum / last.tokens, (int(low) + (int(high) << 32)) % (1 << 64))
        return int(total), Flags(commit > 0, notice > 0, stop > 0, leave > 0)

    def _log(self, outcome: Outcome, loss: float, row_hash: int) -> None:
        grad_norm = float(outcome.grad_norm) if outcome.grad_norm is not None else None
        samples = partial(self._samples, outcome.step - 1)
        skipped = self.bad_steps.take_in(outcome.step, loss, grad_norm, samples)
        if skipped:
            self.journal.event("step-skipped", step=outcome.step, loss=_finite(loss), samples=samples())
            self.journal.set(skippedSteps=self.bad_steps.total)
        record = StepRecord(
            generation=self.generation,
            step=outcome.step,
            epoch=outcome.step / self.schedule.steps_per_epoch,
            loss=_finite(loss),
            gradNorm=_finite(grad_norm),
            learningRate=outcome.learning_rate,
            tokens=outcome.tokens,
            seconds=round(outcome.seconds, 6),
            productiveSeconds=round(outcome.productive_seconds, 6),
            worldSize=self.world_size,
            samples=f"{row_hash:016x}",
            skipped=skipped,
            mfu=self.speed.utilisation(outcome.flops, outcome.seconds, self.world_size),
        )
        self.journal.step(record, outcome.samples, self.total_steps)

    def _samples(self, step: int, most: int = 8) -> str:
        """The first sample ids of a 0-based step, for people."""
        ids = self.schedule.sample_ids(step)
        shown = ", ".join(str(int(i)) for i in ids[:most])
        return shown + (", ..." if len(ids) > most else "")


def _seed(seed: int, step: int, micro_batch: int) -> int:
    """Seed of one micro-batch's dropout, independent of rank and world size."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{step}/{micro_batch}".encode()) >> 1


def _finite(value: float | None) -> float | None:
    """The value, or None in place of one that JSON has no word for."""
    return value if value is not None and math.isfinite(value) else None
