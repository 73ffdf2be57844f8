"""Kahneman-Tversky optimization: learns from answers with a label, instead of pairs.

It is tested against TRL's implementation on the same rows, model and optimizer (docs/how-to/preferences.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from spotune.job.training.metric import STEP_STATISTICS
from spotune_trainer.data.batches import Batch
from spotune_trainer.models.loss import summed_loss
from spotune_trainer.objectives.objective import LossSums
from spotune_trainer.objectives.pair_log_probs import answer_log_probs


class LabelledRewards:
    """Statistics of answers with a label: means over the desirable and over the undesirable ones.

    A mean is absent if there is no such answer.
    """

    names: Final = STEP_STATISTICS["kto"]
    size: Final = 5
    """Rewards of the desirable answers, and their number; the same of the undesirable ones; `kl` of each answer."""

    def means(self, sums: Sequence[float], samples: int) -> Mapping[str, float]:
        """Mean rewards with the names of those of pairs, their difference, and the mean of `kl`."""
        desirable, num_desirable, undesirable, num_undesirable, kl = sums
        found = {"kl": kl / samples}
        if num_desirable:
            found["rewardChosen"] = desirable / num_desirable
        if num_undesirable:
            found["rewardRejected"] = undesirable / num_undesirable
        if num_desirable and num_undesirable:
            found["rewardMargin"] = found["rewardChosen"] - found["rewardRejected"]
        return found


class Kto:
    """KTO (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, equation 8).

    The reward r of an answer is ``beta`` times its log-probability relative to the reference model. The loss of a
    desirable answer is ``1 - sigmoid(r - beta * kl)``, that of an undesirable one ``1 - sigmoid(beta * kl - r)``, each
    times its weight. ``kl`` estimates the KL divergence from the reference model: it is the mean over the step of the
    log-probability ratios of mismatched answers, or 0 if that is negative. It has no gradient.

    Args:
        beta: strength of the penalty for leaving the reference model.
        desirable_weight: weight of the loss of desirable answers.
        undesirable_weight: weight of the loss of undesirable answers.
    """

    losses = 1
    statistics = LabelledRewards()
    needs_reference = True

    def __init__(self, beta: float, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> None:
        self._beta = beta
        self._desirable_weight = desirable_weight
        self._undesirable_weight = undesirable_weight

    def counts(self, batch: Batch) -> tuple[int, ...]:
        """Answers."""
        return (len(batch.sample_ids),)

    def features(self, model: Any, batch: Batch) -> Tensor:
        """Log-probability ratio of the mismatched answer of each row, ``[batch, 1]``."""
        assert batch.mismatched is not None, "only answers with a label come here"
        assert batch.reference_log_probs is not None, "the loader adds them"
        return (answer_log_probs(model, batch.mismatched) - batch.reference_log_probs[:, 1]).unsqueeze(1)

    def __call__(self, model: Any, batch: Batch) -> LossSums:
        """The summed loss of the answers."""
        assert batch.reference_log_probs is not None, "the loader adds them"
        assert batch.desirable is not None, "only answers with a label come here"
        assert batch.step_features is not None, "the pass over the step adds it"
        kl = batch.step_features.values.double().mean().clamp(min=0).float()
        reward = self._beta * (answer_log_probs(model, batch) - batch.reference_log_probs[:, 0])
        sign = batch.desirable.float() * 2 - 1
        weights = torch.where(batch.desirable, self._desirable_weight, self._undesirable_weight)
        losses = weights * (1 - torch.sigmoid(sign * (reward - self._beta * kl)))
        return LossSums((losses.sum(),), _statistics(reward, batch.desirable, kl))

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """The summed cross-entropy."""
        return summed_loss(model, batch)


def _statistics(reward: Tensor, desirable: Tensor, kl: Tensor) -> Tensor:
    """The sums of `LabelledRewards`, ``[5]``, from rewards and labels of the answers, ``[batch]``."""
    reward, is_desirable = reward.detach().double(), desirable.double()
    of_desirable, num_desirable = (reward * is_desirable).sum(), is_desirable.sum()
    return torch.stack(
        [
            of_desirable,
            num_desirable,
            (reward * (1 - is_desirable)).sum(),
            len(reward) - num_desirable,
            kl.double() * len(reward),
        ]
    )
