"""The objectives of classifiers: cross-entropy of the label of each text, or of each word.

They are tested against transformers' Trainer on the same rows, model and optimizer (docs/how-to/classification.md).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from spotune.job.training.metric import STEP_STATISTICS
from spotune_trainer.data.batches import NO_LOSS, Batch
from spotune_trainer.models.loss import skip_packing_detection
from spotune_trainer.objectives.cross_entropy import CrossEntropy
from spotune_trainer.objectives.objective import LossSums, SampleMeans


class TokenClassification(CrossEntropy):
    """Mean cross-entropy over the words of a step. The model's output at the first token of a word counts.

    Label smoothing spreads probability over all labels.
    """

    def __call__(self, model: Any, batch: Batch) -> LossSums:
        """The summed cross-entropy, and the predicted labels."""
        logits = label_logits(model, batch)
        predictions = logits.detach().argmax(-1).view_as(batch.labels)
        loss = functional.cross_entropy(
            logits.flatten(0, -2).float(),
            batch.labels.flatten(),
            ignore_index=NO_LOSS,
            reduction="sum",
            label_smoothing=self._label_smoothing,
        )
        return LossSums((loss,), self._statistics(predictions, batch), predictions)

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """The sum of all outputs."""
        return label_logits(model, batch).sum()

    def _statistics(self, predictions: Tensor, batch: Batch) -> Tensor | None:
        return None


class Classification(TokenClassification):
    """Mean cross-entropy over the texts of a step. Its statistic is the accuracy."""

    statistics = SampleMeans(STEP_STATISTICS["classification"])

    def _statistics(self, predictions: Tensor, batch: Batch) -> Tensor:
        return (predictions == batch.labels).double().sum(0)


def label_logits(model: Any, batch: Batch) -> Tensor:
    """Outputs for each label, of texts ``[batch, labels]``, of words ``[batch, sequence, labels]``.

    Args:
        model: a transformers model for sequence or token classification, or a DeepSpeed engine around one.
        batch: the micro-batch.
    """
    module = getattr(model, "module", model)
    inputs = {"input_ids": batch.input_ids}
    if batch.attention_mask is not None:
        inputs["attention_mask"] = batch.attention_mask
    without_cache = {"use_cache": False} if hasattr(module.config.get_text_config(), "use_cache") else {}
    with skip_packing_detection():
        logits: Tensor = model(**inputs, **without_cache).logits
    return logits
