"""Supervised finetuning: cross-entropy of the label tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spotune_trainer.data.batches import Batch
from spotune_trainer.models.loss import summed_loss
from spotune_trainer.objectives.objective import LossSums, SampleMeans


class CrossEntropy:
    """Mean cross-entropy over the label tokens of a step.

    Args:
        label_smoothing: share of the probability spread over the vocabulary (Szegedy et al. 2016, section 7).
    """

    losses = 1
    statistics = SampleMeans()
    needs_reference = False

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._label_smoothing = label_smoothing

    def counts(self, batch: Batch) -> tuple[int, ...]:
        """Label tokens."""
        return (batch.loss_tokens,)

    def __call__(self, model: Any, batch: Batch) -> LossSums:
        """The summed cross-entropy."""
        return LossSums((summed_loss(model, batch, self._label_smoothing),))

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """The summed cross-entropy."""
        return summed_loss(model, batch)
