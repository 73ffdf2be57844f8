"""What an objective gives for a micro-batch: sums, which add up over micro-batches and ranks to those of a step.

The loss of a step is a sum of means, each over the whole step: of all label tokens, or of all pairs. So it is the same
at any world size and micro-batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from spotune_trainer.data.batches import Batch


@dataclass(frozen=True)
class LossSums:
    """The loss of a micro-batch, as sums.

    Attributes:
        losses: scalar tensors; the loss of a step is the sum of their means, see `mean_loss`.
        statistics: sums over the samples, ``[statistics]``, fp64, without gradients; None if the objective has none.
        predictions: of a classifier, the position of the label with the highest output, in the shape of `Batch.labels`.
    """

    losses: tuple[Tensor, ...]
    statistics: Tensor | None = None
    predictions: Tensor | None = None


class Objective(Protocol):
    """A training objective.

    Attributes:
        losses: how many losses it has.
        statistics: names of its statistics, whose means over the samples are logged.
        needs_reference: whether batches need `reference_log_probs`.
    """

    losses: int
    statistics: tuple[str, ...]
    needs_reference: bool

    def counts(self, batch: Batch) -> tuple[int, ...]:
        """What each of the losses is a sum over in this batch, such as label tokens or pairs."""

    def __call__(self, model: Any, batch: Batch) -> LossSums:
        """The loss of a batch. `model` is a transformers model or a DeepSpeed engine around one."""

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """A scalar that depends on all trained parameters, from one forward pass on rows of any kind.

        A rank without samples multiplies it by zero, and so takes part in the collectives of a step. The profile counts
        its operations.
        """


def mean_loss(losses: Sequence[float], counts: Sequence[int]) -> float:
    """The loss of a step or an evaluation: the sum of the means of its losses."""
    return math.fsum(loss / count for loss, count in zip(losses, counts, strict=True))
