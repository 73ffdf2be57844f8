"""The objective of embeddings: texts that belong together are near, with the other rows of the step as negatives.

It is tested against sentence-transformers' implementation on the same rows, model and optimizer
(docs/how-to/embeddings.md).
"""

from __future__ import annotations

import inspect
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from spotune.job.training.metric import STEP_STATISTICS
from spotune_trainer.data.batches import Batch
from spotune_trainer.models.loss import skip_packing_detection
from spotune_trainer.objectives.objective import LossSums, SampleMeans

Pooling = Literal["mean", "cls", "lastToken"]

RETRIEVAL: Final = SampleMeans(STEP_STATISTICS["embedding"])
"""Fraction of the queries that are nearest to their positive text, and the mean of 1 / rank of the positive text, among
all texts of the step that are no queries."""


class Embedding:
    """Multiple negatives ranking (Henderson et al. 2017, https://arxiv.org/abs/1705.00652, section 4.4), or InfoNCE.

    The loss of a sample is the cross-entropy of its positive text among the positive texts, and the negative ones, of
    all samples of the step, with ``similarity(query, text) / temperature`` as logits.

    Each micro-batch runs the loss of the whole step, with its own embeddings in place of the gathered ones, so its
    gradient is that of the whole step (GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983).

    Args:
        pooling: which outputs of the last layer become the embedding of a text.
        temperature: divides the similarities.
        normalize: scale embeddings to length 1.
    """

    losses = 1
    statistics = RETRIEVAL
    needs_reference = False

    def __init__(self, pooling: Pooling, temperature: float, *, normalize: bool) -> None:
        self._pooling: Pooling = pooling
        self._temperature = temperature
        self._normalize = normalize

    def counts(self, batch: Batch) -> tuple[int, ...]:
        """Samples."""
        return (len(batch.sample_ids),)

    def features(self, model: Any, batch: Batch) -> Tensor:
        """Embeddings of the texts of each sample, one after the other, ``[batch, texts * embedding]``."""
        return self._embed_samples(model, batch).detach().flatten(1)

    def __call__(self, model: Any, batch: Batch) -> LossSums:
        """The summed loss of the samples."""
        assert batch.step_features is not None, "the pass over the step adds it"
        own = self._embed_samples(model, batch)
        count, texts, width = own.shape
        positions = torch.arange(batch.step_features.first, batch.step_features.first + count, device=own.device)
        of_step = batch.step_features.values.view(-1, texts, width).index_copy(0, positions, own)
        documents = of_step[:, 1:].transpose(0, 1).flatten(0, 1)
        if not torch.is_grad_enabled():  # the step of an evaluation is all its samples, too many to score in each batch
            scores = own[:, 0] @ documents.T / self._temperature
            loss = functional.cross_entropy(scores, positions, reduction="sum")
            return LossSums((loss,), _statistics(scores, positions))
        queries = of_step[:, 0]
        scores = queries @ documents.T / self._temperature
        answers = torch.arange(len(queries), device=own.device)
        losses = functional.cross_entropy(scores, answers, reduction="none")
        total = losses.sum()
        # The value is the loss of these samples. The gradient is that of the whole step with respect to them.
        loss = losses[positions].detach().sum() + (total - total.detach())
        return LossSums((loss,), _statistics(scores.detach()[positions], positions))

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """The sum of all embeddings."""
        return embed(model, batch, self._pooling, normalize=False).sum()

    def _embed_samples(self, model: Any, batch: Batch) -> Tensor:
        """Embeddings of the texts of each sample, ``[batch, texts, embedding]``."""
        embedded = embed(model, batch, self._pooling, normalize=self._normalize)
        return embedded.view(batch.texts, len(batch.sample_ids), -1).transpose(0, 1)


def embed(model: Any, batch: Batch, pooling: Pooling, *, normalize: bool) -> Tensor:
    """Embeddings of the rows of a batch, fp32, ``[rows, embedding]``.

    Args:
        model: a transformers model without a head, or a DeepSpeed engine around one.
        batch: rows of one text each.
        pooling: which outputs of the last layer become the embedding.
        normalize: scale embeddings to length 1.
    """
    module = getattr(model, "module", model)
    cache = {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}
    with skip_packing_detection():
        outputs = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **cache)
    hidden = outputs.last_hidden_state.float()
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    pooled = _pool(hidden, mask, pooling)
    return functional.normalize(pooled, dim=1) if normalize else pooled


def _pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    match pooling:
        case "cls":
            return hidden[:, 0]
        case "lastToken":
            return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
        case "mean":
            return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def _statistics(scores: Tensor, answers: Tensor) -> Tensor:
    """Sums of `RETRIEVAL`, ``[2]``.

    Args:
        scores: of all texts, ``[batch, texts]``.
        answers: positions of the positive texts, ``[batch]``.
    """
    better = scores > scores.gather(1, answers.unsqueeze(1))
    ranks = better.sum(1).double() + 1
    return torch.stack([(ranks == 1).double().sum(), (1 / ranks).sum()])
