"""Log-likelihoods of token sequences under a model, as lm-evaluation-harness computes them.

As there, the log-softmax has the dtype of the logits, and padding is on the right without a mask: in a causal model, no
token attends to what follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from spotune_trainer.models.loss import skip_packing_detection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tokens: TypeAlias = tuple[int, ...]
LogLikelihood: TypeAlias = tuple[float, bool]
"""The sum of the log-probabilities of some tokens, and whether each of them is the most likely one at its place."""


def log_likelihoods(
    model: PreTrainedModel, inputs: Sequence[Tokens], targets: Sequence[Sequence[Tokens]]
) -> list[list[LogLikelihood]]:
    """Log-likelihoods of the targets of each input, by one forward pass.

    Args:
        model: in evaluation mode, on its device.
        inputs: of a causal model, all tokens but the last one of each target; of a seq2seq model, those of the encoder.
        targets: of each input. Those of a causal model end one token after the input; a seq2seq input has one.
    """
    logits = _causal_logits(model, inputs) if not model.config.is_encoder_decoder else _logits(model, inputs, targets)
    found: list[list[LogLikelihood]] = []
    for row, (tokens, of_input) in enumerate(zip(inputs, targets, strict=True)):
        found.append([])
        for target in of_input:
            end = len(target) if model.config.is_encoder_decoder else len(tokens)
            log_probs = log_softmax(logits[row, end - len(target) : end], dim=-1)
            expected = torch.tensor(target, device=logits.device)
            is_greedy = bool((log_probs.argmax(dim=-1) == expected).all())
            found[-1].append((float(log_probs.gather(1, expected[:, None]).squeeze(1).sum()), is_greedy))
    return found


def _causal_logits(model: PreTrainedModel, inputs: Sequence[Tokens]) -> Tensor:
    with skip_packing_detection():
        logits: Tensor = model(input_ids=_padded(model, inputs), use_cache=False).logits
    return logits


def _logits(model: PreTrainedModel, inputs: Sequence[Tokens], targets: Sequence[Sequence[Tokens]]) -> Tensor:
    logits: Tensor = model(
        input_ids=_padded(model, inputs),
        attention_mask=_padded(model, [(1,) * len(tokens) for tokens in inputs]),
        labels=_padded(model, [target for [target] in targets]),
    ).logits
    return logits


def _padded(model: PreTrainedModel, rows: Sequence[Tokens]) -> Tensor:
    """Rows with zeros behind them, ``[rows, longest]``, on the device of the model."""
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=torch.long)
    return padded.to(model.device)
