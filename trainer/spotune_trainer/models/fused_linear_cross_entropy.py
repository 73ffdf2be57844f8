"""Cross-entropy straight from hidden states, without ever holding all logits.

Logits are large (tokens x vocabulary) and short-lived. Here the output projection gives the loss itself: chunk by
chunk it computes logits, their loss and their gradient, and of that at once the gradients of the hidden states and of
the weights, so that only one chunk is in memory. The method is that of Liger kernels (Hsu et al. 2024, section 3.2),
whose own function asks the device for the number of labels each time, and so waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spotune.plan.activations import CHUNK_LOGITS, CHUNKED_LOSS_MODELS
from spotune_trainer.data.batches import NO_LOSS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WHOLE_ROWS = 128


class LossHead:
    """Puts the loss in the place of an output projection's logits, while it is asked for.

    Args:
        head: projects hidden states [..., hidden size] to logits [..., vocabulary]; its `forward` is replaced.
        is_compiled: whether the arithmetic on a chunk's logits is one kernel, by torch.compile: in training for each
            number of rows by itself, as layers are, in evaluation for any number.
    """

    def __init__(self, head: nn.Linear, *, is_compiled: bool) -> None:
        self._project: Callable[[Tensor], Tensor] = head.forward
        self._head = head
        self._trained = torch.compile(_score, dynamic=False) if is_compiled else _score
        self._evaluated = _compiled_for_any_rows() if is_compiled else _score
        self._scaled = torch.compile(_scaled) if is_compiled else _scaled
        self._wanted: tuple[Tensor, float] | None = None
        head.forward = self._forward  # type: ignore[assignment, method-assign]

    @contextmanager
    def scoring(self, labels: Tensor, label_smoothing: float) -> Iterator[None]:
        """Within it the head gives the summed loss of its input, whose rows are to predict `labels`."""
        self._wanted = labels, label_smoothing
        try:
            yield
        finally:
            self._wanted = None

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._wanted is None:
            return self._project(hidden)
        labels, label_smoothing = self._wanted
        rows = hidden.reshape(-1, hidden.size(-1))
        weights: list[Tensor | None] = [self._head.weight, self._head.bias]
        if not torch.is_grad_enabled():  # or their gradients would be computed all the same
            weights = [each if each is None else each.detach() for each in weights]
        arithmetic = self._trained if self._head.training else self._evaluated, self._scaled
        loss: Tensor = _LinearCrossEntropy.apply(rows, *weights, labels.reshape(-1), label_smoothing, *arithmetic)
        return loss


def fuse_loss(model: PreTrainedModel, *, is_compiled: bool) -> None:
    """Let the model's output projection compute the loss where that is known to be the same; see `loss_head`."""
    head: Any = model.get_output_embeddings()
    kind = type(head)  # an adapter's or a quantised one is another
    if model.config.model_type in CHUNKED_LOSS_MODELS and kind is nn.Linear:
        head.loss_head = LossHead(head, is_compiled=is_compiled)


def loss_head(model: PreTrainedModel) -> LossHead | None:
    """What `fuse_loss` has put there; None where the loss is computed from logits."""
    return getattr(model.get_output_embeddings(), "loss_head", None)


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of `hidden @ weight.T + bias`; the gradients are computed on the way forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        label_smoothing: float,
        score: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]],
        scaled: Callable[[Tensor, Tensor, torch.dtype], Tensor],
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = _zeros(weight) if ctx.needs_input_grad[1] else None
        of_bias = _zeros(bias) if bias is not None and ctx.needs_input_grad[2] else None
        rows = _chunk_rows(hidden.size(0), weight.size(0))
        for start in range(0, hidden.size(0), rows):
            chunk = hidden[start : start + rows]
            logits = nn.functional.linear(chunk, weight, bias)
            part, gradient = score(logits, labels[start : start + rows], label_smoothing)
            loss += part
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[start : start + rows])
            if of_weight is not None:
                _add_product(of_weight, gradient.T, chunk)
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=torch.float32)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes, ctx.scaled = (hidden.dtype, weight.dtype), scaled
        return loss

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scale = scales[0]
        return (
            None if of_hidden is None else of_hidden.mul_(scale.to(hidden_dtype)),
            None if of_weight is None else ctx.scaled(of_weight, scale, weight_dtype),
            None if of_bias is None else ctx.scaled(of_bias, scale, weight_dtype),
            None,
            None,
            None,
            None,
        )


def _chunk_rows(rows: int, vocabulary: int) -> int:
    """Rows whose logits are in memory at once: equal shares, whole for the units that multiply matrices."""
    chunks = math.ceil(rows * vocabulary / CHUNK_LOGITS)
    share = max(1, math.ceil(rows / max(1, chunks)))
    return share if share < _WHOLE_ROWS else share + -share % _WHOLE_ROWS


def _compiled_for_any_rows() -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """`_score` as one kernel for any number of rows; with a vocabulary of any size it would read them bit by bit.

    Such a kernel adds up in an order that the compiler chooses by the number of rows that it meets first, which is
    another one after a restart: no step may depend on it.
    """

    def for_any_rows(logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        return _score(logits, labels, label_smoothing)  # kernels belong to a function's code, so this needs its own

    compiled = torch.compile(for_any_rows)

    def score(logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        for each in (logits, labels):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        scored: tuple[Tensor, Tensor] = compiled(logits, labels, label_smoothing)
        return scored

    return score


def _score(logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Summed loss of logits [rows, vocabulary], and its gradient in their precision; computed in fp32."""
    precise = logits.float()
    has_loss = labels != NO_LOSS
    expected = labels.clamp(min=0).unsqueeze(1)
    normaliser = precise.logsumexp(1)
    loss = normaliser - (1 - label_smoothing) * precise.gather(1, expected).squeeze(1)
    vocabulary = torch.arange(logits.size(1), device=logits.device)
    target = (1 - label_smoothing) * (vocabulary == expected)
    if label_smoothing:
        loss = loss - label_smoothing * precise.mean(1)
        target = target + label_smoothing / logits.size(1)
    gradient = ((precise - normaliser.unsqueeze(1)).exp() - target) * has_loss.unsqueeze(1)
    return (loss * has_loss).sum(), gradient.to(logits.dtype)


def _scaled(total: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`total * scale` in another precision; PyTorch's own kernel for that reads at a third of the memory's speed."""
    return (total * scale).to(dtype)


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right` in fp32, whatever the precision of the factors."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
