"""The training loop: micro-batches -> loss over the step's tokens -> backward -> clip -> step -> agree on flags.

Exactness at every world size. Micro-batch g of a step belongs to rank g mod world size; a rank without one runs a batch
of zero weight, since collectives need all ranks. The loss is the exact sum of the micro-batches' losses divided by the
step's number of label tokens (or pairs), not a mean of means. Dropout and NEFTune's noise are seeded by (seed, step,
g), and the learning rate is a function of the step, so no random state and no scheduler state needs saving. With
`execution.reproducible: worldSize` gradients are exact sums, too (`engine/fixed_point_gradients.py`).

One small all-reduce per step, on the host. It carries, for the step that starts, its numbers of tokens and the flags of
all ranks (commit, notice, stop, leave), so that all ranks act after the same step. For the step before, it carries the
results (loss, row hash). They are copied to the host behind the optimizer step, and the host reads them only after it
has launched the next forward pass. So it waits for the step before, and the device never idles:

    step k:  forward(0) | all-reduce: tokens and flags of k, results of k-1 | backward, forward(1), ..., optimizer step

If the loss of a sample depends on all samples of the step, a pass without gradients comes first (`step_features.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import xxhash
from torch import Tensor, distributed

from spotune.errors import JobError
from spotune.goodput import Part
from spotune_trainer.data.batches import StepFeatures, combine_hashes
from spotune_trainer.data.loader import MicroBatches
from spotune_trainer.engine.build import gradient_norm_before_update, learning_rate, set_learning_rate
from spotune_trainer.engine.ema import update_ema
from spotune_trainer.engine.fixed_point_gradients import has_fixed_point_gradients
from spotune_trainer.evaluation.ranks import RankGroup
from spotune_trainer.job_directory.node_name import node_name
from spotune_trainer.job_directory.notice import Flags
from spotune_trainer.models.embedding_noise import EmbeddingNoise
from spotune_trainer.models.loss import zero_weight_batch
from spotune_trainer.objectives.build import training_objective
from spotune_trainer.objectives.objective import LossSums, StepObjective, mean_loss
from spotune_trainer.observability.own_time import OwnTime
from spotune_trainer.observability.progress import StepRecord
from spotune_trainer.observability.stragglers import StragglerMeter
from spotune_trainer.training.context import TrainContext
from spotune_trainer.training.nonfinite_steps import BadSteps, nan_unless_finite
from spotune_trainer.training.pending_step import HostCopy, PendingStep, StepCounts
from spotune_trainer.training.step_features import agree_on_width, gather_features

_TWO_TO_32 = 1 << 32


@dataclass(frozen=True)
class FinishedStep:
    """A finished optimizer step.

    Attributes:
        number: optimizer steps done after it.
        flags: what all ranks agreed to do now.
    """

    number: int
    flags: Flags


class TrainingLoop:
    """Runs optimizer steps of one engine on one rank.

    Args:
        context: of the rank.
        bad_steps: counts non-finite steps.
        before_update: called before each optimizer step, which overwrites weights and optimizer states.

    Attributes:
        learning_rate: learning rate of a 0-based step.
    """

    def __init__(
        self, context: TrainContext, bad_steps: BadSteps, before_update: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = context.engine
        self.training = context.job.spec.training
        self.objective = training_objective(self.training)
        self.schedule = context.datasets.schedule
        self.learning_rate = learning_rate(self.training, context.total_steps)
        self.total_steps = context.total_steps
        self.accumulation = context.accumulation
        self.generation = context.task.generation
        self.reporter = context.reporter
        self.mfu_meter = context.mfu_meter
        self.control = context.control
        self.before_update = before_update
        self.world_size = context.world_size
        self.bad_steps = bad_steps
        alpha = self.training.neftune_noise_alpha
        self._noise = EmbeddingNoise(self.engine.module, alpha) if alpha else None
        self._no_counts = StepCounts(0, 0, (0,) * self.objective.losses)
        self._num_sums = self.objective.losses + self.objective.statistics.size
        self._micro_batch_size = context.plan.micro_batch_size
        self._shape_of_sums = (context.micro_batches, self._num_sums)
        self._sums_are_exact = has_fixed_point_gradients(self.engine)
        self._step_objective = self.objective if isinstance(self.objective, StepObjective) else None
        self._step_values: Tensor | None = None
        self._num_features: int | None = None  # known after the first step
        self._zero_weight_batch = zero_weight_batch(context.job.spec.model.task).to(self.engine.device)
        self._pending: PendingStep | None = None
        self._rank = context.rank
        self._own_time = OwnTime(context.reporter.stopwatch)
        nodes = RankGroup(context.rank, context.world_size, context.control).gather(node_name())
        self.stragglers = StragglerMeter(nodes)

    def run(
        self, batches: Iterable[MicroBatches], first_step: int, propose_flags: Callable[[int], Flags]
    ) -> Iterator[FinishedStep]:
        """Train on each step's micro-batches; yields after each optimizer step.

        Args:
            batches: this rank's micro-batches, one list for each step.
            first_step: optimizer steps done before.
            propose_flags: what this rank proposes to do after the step of that number.

        Raises:
            JobError: a step has no label token, or too many steps in a row are not finite.
        """
        started = time.monotonic()
        for step, micro_batches in enumerate(batches, start=first_step):
            self._own_time.begin_step()
            if self._step_objective is not None:
                self._step_values = self._gather_features(self._step_objective, step, micro_batches)
            first_loss = self._forward(step, micro_batches, 0)  # the device works while the ranks agree
            counts, flags = self._agree(step, micro_batches, propose_flags(step + 1))
            pending = self._forward_backward_step(step, micro_batches, counts, first_loss)
            now = time.monotonic()
            pending.seconds, started = now - started, now
            pending.productive_seconds = self.reporter.stopwatch.lap(Part.PRODUCTIVE)
            pending.data_wait_seconds = self.reporter.stopwatch.lap(Part.DATA_WAIT)
            pending.own_seconds = self._own_time.finish_step()
            self._pending = pending
            yield FinishedStep(step + 1, flags)

    def log_pending_step(self) -> None:
        """Log the last step now, not with the next one. For use before a commit, an evaluation or the exit."""
        if self._pending is not None:
            self._all_reduce(self._no_counts, Flags())

    def _forward(self, step: int, micro_batches: MicroBatches, index: int) -> LossSums:
        """Loss of this rank's micro-batch `index`; of a batch of zero weight if it has fewer micro-batches."""
        if index >= len(micro_batches):
            if self._sums_are_exact:  # no collective needs this rank
                return LossSums(())
            return LossSums((self.objective.forward(self.engine, self._zero_weight_batch),))
        g, batch = micro_batches[index]
        batch = batch.to(self.engine.device)
        if self._step_values is not None:
            batch = replace(batch, step_features=StepFeatures(self._step_values, g * self._micro_batch_size))
        torch.manual_seed(_random_seed(self.training.seed, step, g))
        with self._noise.added(batch) if self._noise else nullcontext():
            return self.objective(self.engine, batch)

    def _gather_features(self, objective: StepObjective, step: int, micro_batches: MicroBatches) -> Tensor:
        """Features of all samples of a step, ``[samples, features]``, by a pass without gradients on all ranks.

        Its dropout and noise are those of the pass with gradients.
        """
        engine, of_rank = self.engine, []
        with torch.no_grad():
            for index in range(self.accumulation):
                if index < len(micro_batches):
                    g, batch = micro_batches[index]
                    batch = batch.to(engine.device)
                    torch.manual_seed(_random_seed(self.training.seed, step, g))
                    with self._noise.added(batch.mismatched or batch) if self._noise else nullcontext():
                        of_rank.append(objective.features(engine, batch))
                else:
                    objective.forward(engine, self._zero_weight_batch)
                self.reporter.heartbeat()
        samples = self.schedule.sample_ids(step).size
        if self._num_features is None:
            self._num_features = agree_on_width(of_rank, self.control)
        shape = self.accumulation, self._micro_batch_size, self._num_features
        return gather_features(of_rank, shape, samples, engine.device)

    def _forward_backward_step(
        self, step: int, micro_batches: MicroBatches, counts: StepCounts, loss: LossSums
    ) -> PendingStep:
        """Backward of all micro-batches, clipping, and the optimizer step.

        Args:
            step: 0-based.
            micro_batches: of this rank.
            counts: of the step, over all ranks.
            loss: of the first micro-batch, whose forward pass has been launched already.
        """
        rate = self.learning_rate(step)
        set_learning_rate(self.engine, rate)
        sums = torch.zeros(self._shape_of_sums, dtype=torch.float64, device=self.engine.device)
        grad_norm, row_hash, flops = None, 0, 0.0
        averaged = 1 if self._sums_are_exact else self.world_size  # DeepSpeed averages gradients over the ranks
        weights = [averaged / count for count in counts.losses]
        for index in range(self.accumulation):
            if index > 0:
                loss = self._forward(step, micro_batches, index)
            if index < len(micro_batches):
                g, batch = micro_batches[index]
                self.engine.backward(_weighted(loss, weights), scale_wrt_gas=False)
                sums[g] = _detached(loss)
                row_hash = combine_hashes([row_hash, *batch.row_hashes()])
                flops += self.mfu_meter.flops(batch)
            elif loss.losses:
                self.engine.backward(loss.losses[0] * 0.0, scale_wrt_gas=False)
            if index == self.accumulation - 1:
                grad_norm = gradient_norm_before_update(self.engine)
                self.before_update()
            self.engine.step()  # clips and updates after the last micro-batch only
            self.reporter.heartbeat()
        if self.training.ema_decay:
            update_ema(self.engine, self.training.ema_decay)
        if grad_norm is None:
            grad_norm = self.engine.get_global_grad_norm()
        norm = None if grad_norm is None else HostCopy(torch.as_tensor(grad_norm, dtype=torch.float64))
        samples = self.schedule.sample_ids(step).size
        return PendingStep(step + 1, rate, counts, samples, HostCopy(sums.flatten()), norm, row_hash, flops)

    def _agree(self, step: int, micro_batches: MicroBatches, proposed: Flags) -> tuple[StepCounts, Flags]:
        """Counts of the whole step, and the flags that any rank proposed."""
        of_batches = [self.objective.counts(batch) for _, batch in micro_batches] or [self._no_counts.losses]
        mine = StepCounts(
            tokens=sum(batch.tokens for _, batch in micro_batches),
            labels=sum(batch.loss_tokens for _, batch in micro_batches),
            losses=tuple(map(sum, zip(*of_batches, strict=True))),
        )
        counts, flags = self._all_reduce(mine, proposed)
        if counts.labels == 0:
            raise JobError(
                f"dataset: no row of step {step + 1} contributes to the loss (samples {self._samples(step)}); "
                "their answers or labels are empty or cut away by dataset.maxLength"
            )
        return counts, flags

    def _all_reduce(self, counts: StepCounts, proposed: Flags) -> tuple[StepCounts, Flags]:
        """Sum counts and flags over the ranks. The same all-reduce sums the results of the pending step, if any."""
        last, num_sums = self._pending, math.prod(self._shape_of_sums)
        values = torch.tensor(
            [
                counts.labels,
                proposed.commit,
                proposed.notice,
                proposed.stop,
                proposed.leave,
                # In halves of 32 bits, whose sums over the ranks are exact in a double.
                last.row_hash % _TWO_TO_32 if last else 0,
                last.row_hash >> 32 if last else 0,
                last.flops if last else 0.0,
                counts.tokens,
                *counts.losses,
                *(last.sums.read() if last else [0.0] * num_sums),  # each of one rank: exact, too
                *(last.own_seconds if last and rank == self._rank else 0.0 for rank in range(self.world_size)),
            ],
            dtype=torch.float64,
        )
        distributed.all_reduce(values, group=self.control)
        labels, commit, notice, stop, leave, low, high, flops, tokens, *others = values.tolist()
        others, own_seconds = others[: -self.world_size], others[-self.world_size :]
        losses, of_micro_batches = others[:-num_sums], others[-num_sums:]
        sums = [_exact_sum(of_micro_batches[index :: self._num_sums]) for index in range(self._num_sums)]
        self._pending = None
        if last is not None:
            last.flops = flops
            self._log(last, sums, (int(low) + (int(high) << 32)) % (1 << 64))
            self._compare_ranks(last, own_seconds)
        summed = StepCounts(int(tokens), int(labels), tuple(map(int, losses)))
        return summed, Flags(commit > 0, notice > 0, stop > 0, leave > 0)

    def _log(self, last: PendingStep, sums: Sequence[float], row_hash: int) -> None:
        """Record a step, given its sums and the hash of its rows over all ranks."""
        terms = len(last.counts.losses)
        loss = mean_loss(sums[:terms], last.counts.losses)
        grad_norm = None if last.grad_norm is None else last.grad_norm.read()
        samples = partial(self._samples, last.step - 1)
        skipped = self.bad_steps.record(last.step, loss, grad_norm, samples)
        if skipped:
            self.reporter.record_event("step-skipped", step=last.step, loss=_finite(loss), samples=samples())
            self.reporter.update(skippedSteps=self.bad_steps.total)
        record = StepRecord(
            generation=self.generation,
            step=last.step,
            epoch=last.step / self.schedule.steps_per_epoch,
            loss=_finite(loss),
            gradNorm=_finite(grad_norm),
            learningRate=last.learning_rate,
            tokens=last.counts.tokens,
            labelTokens=last.counts.labels,
            seconds=round(last.seconds, 6),
            productiveSeconds=round(last.productive_seconds, 6),
            dataWaitSeconds=round(last.data_wait_seconds, 6),
            worldSize=self.world_size,
            samples=f"{row_hash:016x}",
            skipped=skipped,
            mfu=self.mfu_meter.mfu(last.flops, last.productive_seconds + last.data_wait_seconds, self.world_size),
            statistics=dict(self.objective.statistics.means(sums[terms:], last.samples)),
        )
        self.reporter.record_step(record, last.samples, self.total_steps)

    def _compare_ranks(self, last: PendingStep, own_seconds: Sequence[float]) -> None:
        """Count the own times of a step, and report which ranks are slow for long."""
        count = -(-last.samples // self._micro_batch_size)
        of_ranks = [len(range(rank, count, self.world_size)) for rank in range(self.world_size)]
        known = {each.rank for each in self.stragglers.stragglers}
        if self.stragglers.record(own_seconds, of_ranks):
            self.reporter.update(**self.stragglers.as_json())
            for each in self.stragglers.stragglers:
                if each.rank not in known:
                    self.reporter.record_event("straggler", step=last.step, **each.as_json())

    def _samples(self, step: int, limit: int = 8) -> str:
        """The first sample ids of a 0-based step, for messages."""
        ids = self.schedule.sample_ids(step)
        shown = ", ".join(str(int(i)) for i in ids[:limit])
        return shown + (", ..." if len(ids) > limit else "")


def _weighted(loss: LossSums, weights: Sequence[float]) -> Tensor:
    """The loss to run backward on: each of the losses with its weight; NaN unless all are finite."""
    first, *others = (each * nan_unless_finite(each, weight) for each, weight in zip(loss.losses, weights, strict=True))
    return sum(others, first)


def _detached(loss: LossSums) -> Tensor:
    """Losses and statistics without gradients, fp64, ``[losses + statistics]``."""
    losses = torch.stack([each.detach().double() for each in loss.losses])
    return losses if loss.statistics is None else torch.cat([losses, loss.statistics])


def _exact_sum(values: Sequence[float]) -> float:
    """The correctly rounded sum, which does not depend on the order; infinite or NaN if a value is."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _random_seed(seed: int, step: int, micro_batch: int) -> int:
    """Seed of dropout and noise of one micro-batch; it depends on neither rank nor world size."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{step}/{micro_batch}".encode()) >> 1


def _finite(value: float | None) -> float | None:
    """The value; None if it is NaN or infinite, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
