"""What an objective gives for a micro-batch: sums, which add up over micro-batches and ranks to those of a step.

The loss of a step is a sum of means, each over the whole step: of all label tokens, or of all pairs. So it is the same
at any world size and micro-batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from spotune_trainer.data.batches import Batch


@dataclass(frozen=True)
class LossSums:
    """The loss of a micro-batch, as sums.

    Attributes:
        losses: scalar tensors; the loss of a step is the sum of their means, see `mean_loss`.
        statistics: sums over the samples, ``[Statistics.size]``, fp64, without gradients; None if there are none.
        predictions: of a classifier, the position of the label with the highest output, in the shape of `Batch.labels`.
    """

    losses: tuple[Tensor, ...]
    statistics: Tensor | None = None
    predictions: Tensor | None = None


class Statistics(Protocol):
    """What is logged beside the loss."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all means, in `spotune.job.training.metric.STEP_STATISTICS` too. Trackers have a curve for each."""

    @property
    def size(self) -> int:
        """Number of sums of a micro-batch."""

    def means(self, sums: Sequence[float], samples: int) -> Mapping[str, float]:
        """What is logged, by name, from the sums over all samples and their number."""


@dataclass(frozen=True)
class SampleMeans:
    """Statistics that are means over all samples.

    Attributes:
        names: of the statistics.
    """

    names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of sums: one for each statistic."""
        return len(self.names)

    def means(self, sums: Sequence[float], samples: int) -> Mapping[str, float]:
        """The means by name."""
        return {name: total / samples for name, total in zip(self.names, sums, strict=True)}


class Objective(Protocol):
    """A training objective.

    Attributes:
        losses: how many losses it has.
        needs_reference: whether batches need `reference_log_probs`.
    """

    losses: int
    needs_reference: bool

    @property
    def statistics(self) -> Statistics:
        """What is logged beside the loss."""

    def counts(self, batch: Batch) -> tuple[int, ...]:
        """What each of the losses is a sum over in this batch, such as label tokens or pairs."""

    def __call__(self, model: Any, batch: Batch) -> LossSums:
        """The loss of a batch. `model` is a transformers model or a DeepSpeed engine around one."""

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """A scalar that depends on all trained parameters, from one forward pass on rows of any kind.

        A rank without samples multiplies it by zero, and so takes part in the collectives of a step. The profile counts
        its operations.
        """


@runtime_checkable
class StepObjective(Objective, Protocol):
    """An objective whose loss of a sample depends on all samples of the step.

    Each step has a pass without gradients over all its micro-batches, before the first pass with gradients. It gives
    the features of each sample, which all ranks gather. Batches then have them as `step_features`.
    """

    def features(self, model: Any, batch: Batch) -> Tensor:
        """Features of the samples of a batch from one forward pass, fp32, ``[batch, features]``."""


def mean_loss(losses: Sequence[float], counts: Sequence[int]) -> float:
    """The loss of a step or an evaluation: the sum of the means of its losses."""
    return math.fsum(loss / count for loss, count in zip(losses, counts, strict=True))
