"""The objective of a reward model, which scores answers: Bradley-Terry's model of preferences.

It is tested against TRL's implementation on the same rows, model and optimizer (docs/how-to/preferences.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from spotune_trainer.data.batches import Batch
from spotune_trainer.models.loss import skip_packing_detection
from spotune_trainer.objectives.objective import LossSums
from spotune_trainer.objectives.preference import REWARDS, reward_statistics


class Reward:
    """Learns rewards from pairs (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 1).

    The loss of a pair is ``-log sigmoid(reward of chosen - reward of rejected)``. The model has a head with one output.
    """

    losses = 1
    statistics = REWARDS
    needs_reference = False

    def counts(self, batch: Batch) -> tuple[int, ...]:
        """Pairs."""
        assert batch.pairs is not None, "only rows with pairs come here"
        return (len(batch.pairs),)

    def __call__(self, model: Any, batch: Batch) -> LossSums:
        """The summed loss of the pairs."""
        chosen, rejected = rewards(model, batch).chunk(2)
        loss = -functional.logsigmoid(chosen - rejected)
        return LossSums((loss.sum(),), reward_statistics(chosen, rejected))

    def forward(self, model: Any, batch: Batch) -> Tensor:
        """The sum of the rewards."""
        return rewards(model, batch).sum()


def rewards(model: Any, batch: Batch) -> Tensor:
    """Rewards of the answers, fp32, ``[answers]``: of all chosen ones, then of all rejected ones.

    The reward is the head's output at the last token that is not the padding token, as transformers computes it. If the
    end-of-text token is used for padding, that is the token before it. Rows that are no pairs are one answer each.

    Args:
        model: a transformers model for sequence classification with one label, or a DeepSpeed engine around one.
        batch: the micro-batch.
    """
    module = getattr(model, "module", model)
    input_ids = split_pairs(batch, module.config.get_text_config().pad_token_id)
    # Padding is on the right, where causal attention does not see it: no mask is needed.
    with skip_packing_detection():
        logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits.squeeze(-1).float()


def split_pairs(batch: Batch, pad_token_id: int) -> Tensor:
    """Each answer with its prompt in a row of its own, padded on the right.

    Returns:
        Input ids: of pairs ``[2 * batch, longest answer]``, all chosen ones first; of other rows those of the batch.
    """
    pairs = batch.pairs
    if pairs is None:
        return batch.input_ids
    width = pairs.longest
    padded = functional.pad(batch.input_ids, (0, width), value=pad_token_id)
    positions = torch.arange(width, device=padded.device)
    starts, lengths = pairs.starts.unsqueeze(2), pairs.lengths.unsqueeze(2)
    documents = padded[pairs.rows.view(-1, 1, 1), positions + starts].where(positions < lengths, pad_token_id)
    return documents.transpose(0, 1).flatten(0, 1)
