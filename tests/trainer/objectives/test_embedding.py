"""An evaluation with embeddings has the loss of a training step, and scores only the queries of the batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spotune_trainer.data.batches import Batch, StepFeatures, collate
from spotune_trainer.objectives.embedding import Embedding

SAMPLES, BATCH, TOKENS, WIDTH = 64, 4, 5, 8


class Model(torch.nn.Module):
    """The outputs of its last layer are the vectors of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vectors = torch.nn.Embedding(100, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return SimpleNamespace(last_hidden_state=self.vectors(input_ids))


class LargestResult(TorchFunctionMode):
    """Records the number of elements of the largest tensor that a function of torch returns."""

    elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def batches_of_step(model: Model, objective: Embedding, texts: int) -> list[Batch]:
    """All batches of a step or evaluation set, with the features of all of its samples."""
    generator = np.random.default_rng(0)
    rows = [
        {
            "input_ids": generator.integers(1, 100, texts * TOKENS),
            "labels": np.zeros(texts * TOKENS, np.int64),
            "text_lengths": np.full(texts, TOKENS),
        }
        for _ in range(SAMPLES)
    ]
    batches = [collate(rows[start : start + BATCH], "causal", 0) for start in range(0, SAMPLES, BATCH)]
    values = torch.cat([objective.features(model, batch) for batch in batches])
    return [replace(batch, step_features=StepFeatures(values, index * BATCH)) for index, batch in enumerate(batches)]


@pytest.mark.parametrize("texts", [2, 3], ids=["pairs", "with negatives"])
def test_without_gradients_a_batch_has_the_loss_of_training_and_scores_its_own_queries_only(texts: int) -> None:
    model, objective = Model(), Embedding("mean", 0.05, normalize=True)
    for batch in batches_of_step(model, objective, texts):
        trained = objective(model, batch)
        with torch.no_grad(), LargestResult() as largest:
            evaluated = objective(model, batch)
        torch.testing.assert_close(evaluated.losses[0], trained.losses[0].detach())
        torch.testing.assert_close(evaluated.statistics, trained.statistics)
        assert largest.elements < SAMPLES * SAMPLES
