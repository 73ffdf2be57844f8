"""Log-probabilities of answers: of the chosen and rejected ones of pairs, and of answers with a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from spotune_trainer.data.batches import NO_LOSS, Batch
from spotune_trainer.models.loss import run_model


@dataclass(frozen=True)
class PairLogProbs:
    """What a model makes of pairs. All tensors are fp32.

    Attributes:
        chosen: log-probability of each chosen answer, summed over its tokens, ``[pairs]``.
        rejected: the same of the rejected answers.
        chosen_tokens: tokens of each chosen answer within the maximum length, ``[pairs]``.
        rejected_tokens: the same of the rejected answers.
        chosen_text: log-probability of prompts and chosen answers, summed over all their tokens; a scalar.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_text: Tensor


def pair_log_probs(model: Any, batch: Batch) -> PairLogProbs:
    """Run a model on pairs, both answers of a pair in one row.

    Each pair sums over its whole row, with zeros outside of its documents. So packed rows need ``[pairs, sequence]``
    numbers, far fewer than the logits, and a sum does not depend on the other pairs of the row.

    Args:
        model: a causal transformers model or a DeepSpeed engine around one.
        batch: has `pairs`.
    """
    pairs = batch.pairs
    assert pairs is not None, "only rows with pairs come here"
    log_probs, is_answer = (of_rows[pairs.rows] for of_rows in _token_log_probs(model, batch))
    positions = torch.arange(log_probs.size(1), device=log_probs.device)
    starts, stops = pairs.starts.unsqueeze(2), (pairs.starts + pairs.lengths - 1).unsqueeze(2)
    # The last position of a document would predict the first token of the next one.
    of_chosen, of_rejected = ((positions >= starts) & (positions < stops)).unbind(1)
    chosen, rejected = is_answer & of_chosen, is_answer & of_rejected
    return PairLogProbs(
        chosen=_sum_where(chosen, log_probs),
        rejected=_sum_where(rejected, log_probs),
        chosen_tokens=chosen.sum(1).float(),
        rejected_tokens=rejected.sum(1).float(),
        chosen_text=_sum_where(of_chosen, log_probs).sum(),
    )


def answer_log_probs(model: Any, batch: Batch) -> Tensor:
    """Log-probability of the answer of each row, summed over its tokens, fp32, ``[batch]``.

    Args:
        model: a causal transformers model or a DeepSpeed engine around one.
        batch: rows of one document.
    """
    log_probs, is_answer = _token_log_probs(model, batch)
    return _sum_where(is_answer, log_probs)


def both_log_probs(model: Any, batch: Batch) -> Tensor:
    """Log-probabilities of both answers of each pair, ``[pairs, 2]``, or labelled answer, ``[batch, 2]``, fp32.

    Args:
        model: a causal transformers model or a DeepSpeed engine around one.
        batch: rows with pairs, or labelled answers with mismatched ones.
    """
    if batch.mismatched is not None:
        return torch.stack([answer_log_probs(model, batch), answer_log_probs(model, batch.mismatched)], dim=1)
    pairs = pair_log_probs(model, batch)
    return torch.stack([pairs.chosen, pairs.rejected], dim=1)


def _token_log_probs(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """At each position, the log-probability of the token after it, and whether that is an answer's."""
    inputs = batch.model_inputs()
    labels = inputs.pop("labels")
    logits = run_model(model, batch, inputs)
    # Position i predicts token i + 1, and the last position nothing.
    tokens = functional.pad(batch.input_ids[:, 1:], (0, 1))
    is_answer = functional.pad(labels[:, 1:], (0, 1), value=NO_LOSS) != NO_LOSS
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="none")
    return -loss.view_as(tokens), is_answer


def _sum_where(mask: Tensor, values: Tensor) -> Tensor:
    """Sum of each row over the mask; also with infinite values outside it."""
    return torch.where(mask, values, 0.0).sum(1)
