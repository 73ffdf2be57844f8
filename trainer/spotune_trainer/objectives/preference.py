"""Objectives that learn to prefer a chosen answer over a rejected one.

Each is tested against TRL's implementation on the same rows, model and optimizer (docs/how-to/preferences.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spotune.job.training.metric import STEP_STATISTICS
from spotune_trainer.data.batches import Batch
from spotune_trainer.models.loss import summed_loss
from spotune_trainer.objectives.objective import LossSums
from spotune_trainer.objectives.pair_log_probs import pair_log_probs


class PairRewards:
    """Statistics of all objectives that learn from pairs: means over the pairs, of which a packed row has several."""

    names: Final = STEP_STATISTICS["dpo"]
    """Those of all objectives that learn from pairs."""
    size: Final = 5
    """Rewards of the chosen and of the rejected answers, their differences, the number of pairs whose chosen answer has
    the higher reward, and that of all pairs."""

    def means(self, sums: Sequence[float], samples: int) -> Mapping[str, float]:
        """Mean rewards, their mean difference, and the fraction of pairs whose chosen answer has the higher reward."""
        *totals, pairs = sums
        return {name: total / pairs for name, total in zip(self.names, totals, strict=True)}


REWARDS: Final = PairRewards()

_MAX_LOG_PROB: Final = -torch.finfo(torch.float32).eps
"""Largest mean log-probability of an answer in odds, -2^-23, about -1.2e-7. At 0, that of a certain answer,
the odds would be infinite."""


class LanguageModelPreference:
    """What the objectives for language models have in common."""

    losses = 1
    statistics = REWARDS
    needs_reference = False

    def counts(self, batch: Batch) -> tuple[int, ...]:
        """Pairs."""
        assert batch.pairs is not None, "only rows with pairs come here"
        return (len(batch.pairs),)

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """The summed cross-entropy."""
        return summed_loss(model, batch)


class Dpo(LanguageModelPreference):
    """Direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7).

    The reward of an answer is ``beta`` times its log-probability relative to the reference model. The loss of a pair is
    ``-log sigmoid(reward of chosen - reward of rejected)``.

    Args:
        beta: strength of the penalty for leaving the reference model.
        label_smoothing: probability that the answers of a pair are swapped (conservative DPO, Mitchell 2023).
    """

    needs_reference = True

    def __init__(self, beta: float, label_smoothing: float = 0.0) -> None:
        self._beta = beta
        self._label_smoothing = label_smoothing

    def __call__(self, model: Any, batch: Batch) -> LossSums:
        """The summed loss of the pairs."""
        assert batch.reference_log_probs is not None, "the loader adds them"
        policy = pair_log_probs(model, batch)
        chosen = self._beta * (policy.chosen - batch.reference_log_probs[:, 0])
        rejected = self._beta * (policy.rejected - batch.reference_log_probs[:, 1])
        margin = chosen - rejected
        smoothing = self._label_smoothing
        loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        return LossSums((loss.sum(),), reward_statistics(chosen, rejected))


class Orpo(LanguageModelPreference):
    """Odds ratio preference optimization (Hong et al. 2024, https://arxiv.org/abs/2403.07691, equations 6 and 7).

    The loss is the mean cross-entropy of all tokens of prompts and chosen answers, plus ``beta`` (lambda in the paper)
    times the mean of ``-log sigmoid(log odds of chosen - log odds of rejected)``. The probability of an answer is the
    geometric mean over its tokens. As in the authors' code and in TRL, the cross-entropy includes the prompt.

    Args:
        beta: weight of the odds ratio loss.
    """

    losses = 2

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def counts(self, batch: Batch) -> tuple[int, ...]:
        """Predicted tokens of prompts with chosen answers, and pairs."""
        assert batch.pairs is not None, "only rows with pairs come here"
        pairs = len(batch.pairs)
        return int(batch.pairs.lengths[:, 0].sum()) - pairs, pairs

    def __call__(self, model: Any, batch: Batch) -> LossSums:
        """The summed cross-entropy, and the weighted odds ratio loss summed over the pairs."""
        policy = pair_log_probs(model, batch)
        chosen, rejected = policy.chosen / policy.chosen_tokens, policy.rejected / policy.rejected_tokens
        odds_ratio = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        losses = -policy.chosen_text, -self._beta * logsigmoid(odds_ratio).sum()
        return LossSums(losses, reward_statistics(self._beta * chosen, self._beta * rejected))


class SimPo(LanguageModelPreference):
    """Simple preference optimization (Meng et al. 2024, https://arxiv.org/abs/2405.14734, equation 6).

    The reward of an answer is ``beta`` times the mean log-probability of its tokens. The loss of a pair is
    ``-log sigmoid(reward of chosen - reward of rejected - target margin)``.

    Args:
        beta: scale of the reward.
        target_margin: gamma in the paper.
    """

    def __init__(self, beta: float, target_margin: float) -> None:
        self._beta = beta
        self._target_margin = target_margin

    def __call__(self, model: Any, batch: Batch) -> LossSums:
        """The summed loss of the pairs."""
        policy = pair_log_probs(model, batch)
        chosen = self._beta * policy.chosen / policy.chosen_tokens
        rejected = self._beta * policy.rejected / policy.rejected_tokens
        loss = -logsigmoid(chosen - rejected - self._target_margin)
        return LossSums((loss.sum(),), reward_statistics(chosen, rejected))


def _log1mexp(log_prob: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for x <= 0; values above `_MAX_LOG_PROB` count as that.

    ``log(-expm1(x))`` if x > -ln 2, else ``log1p(-exp(x))`` (Maechler 2012, "Accurately computing log(1 - exp(-|a|))",
    equation 7). The clamps keep each branch finite where the other one is used, and so the gradient of both.
    """
    near = torch.log(-torch.expm1(log_prob.clamp(-math.log(2), _MAX_LOG_PROB)))
    far = torch.log1p(-torch.exp(log_prob.clamp(max=-math.log(2))))
    return torch.where(log_prob > -math.log(2), near, far)


def reward_statistics(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The sums of `PairRewards`, ``[5]``, from the rewards of the answers, ``[pairs]``."""
    chosen, rejected = chosen.detach().double(), rejected.detach().double()
    better, pairs = (chosen > rejected).double().sum(), chosen.new_full((), len(chosen))
    return torch.stack([chosen.sum(), rejected.sum(), (chosen - rejected).sum(), better, pairs])
