"""Fused linear cross-entropy: the loss straight from hidden states, without all logits in memory at once.

Logits are large (tokens x vocabulary) and short-lived. Here the output projection returns the loss. It goes through the
rows in chunks. For each chunk it computes the logits, their loss and their gradient, and from that the gradients of
hidden states and weights, so that only one chunk of logits exists. The method is that of Liger Kernel (Hsu et al. 2024,
section 3.2). Liger's own function copies the number of labels to the host in each call, which makes the host wait.
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

_ROW_MULTIPLE = 128


class LossHead:
    """Makes an output projection return the loss instead of logits, within `returning_loss`.

    Args:
        head: projects hidden states [..., hidden size] to logits [..., vocabulary]; its `forward` is replaced.
        is_compiled: compile the arithmetic on a chunk's logits to one kernel. Training compiles it for each number of
            rows, as for layers; evaluation compiles it once for any number.
    """

    def __init__(self, head: nn.Linear, *, is_compiled: bool) -> None:
        self._project: Callable[[Tensor], Tensor] = head.forward
        self._head = head
        self._trained = torch.compile(_score, dynamic=False) if is_compiled else _score
        self._evaluated = _compiled_for_any_rows() if is_compiled else _score
        self._scaled = torch.compile(_scaled) if is_compiled else _scaled
        self._loss_inputs: tuple[Tensor, float] | None = None
        head.forward = self._forward  # type: ignore[assignment, method-assign]

    @contextmanager
    def returning_loss(self, labels: Tensor, label_smoothing: float) -> Iterator[None]:
        """Within it the head returns the summed loss, a scalar; `labels` has a label for each row of its input."""
        self._loss_inputs = labels, label_smoothing
        try:
            yield
        finally:
            self._loss_inputs = None

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._loss_inputs is None:
            return self._project(hidden)
        labels, label_smoothing = self._loss_inputs
        rows = hidden.reshape(-1, hidden.size(-1))
        weights: list[Tensor | None] = [self._head.weight, self._head.bias]
        if not torch.is_grad_enabled():  # else `ctx.needs_input_grad` is true for them, and gradients are computed
            weights = [each if each is None else each.detach() for each in weights]
        arithmetic = self._trained if self._head.training else self._evaluated, self._scaled
        loss: Tensor = _LinearCrossEntropy.apply(rows, *weights, labels.reshape(-1), label_smoothing, *arithmetic)
        return loss


def fuse_linear_cross_entropy(model: PreTrainedModel, *, is_compiled: bool) -> None:
    """Attach a `LossHead` to the model's output projection, for model types where the loss is known to be the same."""
    head: Any = model.get_output_embeddings()
    kind = type(head)  # an adapter or quantization changes the class
    if model.config.model_type in CHUNKED_LOSS_MODELS and kind is nn.Linear:
        head.loss_head = LossHead(head, is_compiled=is_compiled)


def loss_head(model: PreTrainedModel) -> LossHead | None:
    """The head that `fuse_linear_cross_entropy` has attached; None if the loss is to be computed from logits."""
    return getattr(model.get_output_embeddings(), "loss_head", None)


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of `hidden @ weight.T + bias`. The forward pass computes the gradients, too."""

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
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = _zeros(weight) if ctx.needs_input_grad[1] else None
        bias_gradient = _zeros(bias) if bias is not None and ctx.needs_input_grad[2] else None
        rows = _chunk_rows(hidden.size(0), weight.size(0))
        for start in range(0, hidden.size(0), rows):
            chunk = hidden[start : start + rows]
            logits = nn.functional.linear(chunk, weight, bias)
            part, logits_gradient = score(logits, labels[start : start + rows], label_smoothing)
            loss += part
            if hidden_gradient is not None:
                torch.mm(logits_gradient, weight, out=hidden_gradient[start : start + rows])
            if weight_gradient is not None:
                _add_product(weight_gradient, logits_gradient.T, chunk)
            if bias_gradient is not None:
                bias_gradient += logits_gradient.sum(0, dtype=torch.float32)
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        ctx.dtypes, ctx.scaled = (hidden.dtype, weight.dtype), scaled
        return loss

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient, bias_gradient = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scale = scales[0]
        return (
            None if hidden_gradient is None else hidden_gradient.mul_(scale.to(hidden_dtype)),
            None if weight_gradient is None else ctx.scaled(weight_gradient, scale, weight_dtype),
            None if bias_gradient is None else ctx.scaled(bias_gradient, scale, weight_dtype),
            None,
            None,
            None,
            None,
        )


def _chunk_rows(rows: int, vocabulary: int) -> int:
    """Rows of a chunk: equal chunks of at most about CHUNK_LOGITS logits, a multiple of what GPUs multiply fast."""
    chunks = math.ceil(rows * vocabulary / CHUNK_LOGITS)
    share = max(1, math.ceil(rows / max(1, chunks)))
    return share if share < _ROW_MULTIPLE else share + -share % _ROW_MULTIPLE


def _compiled_for_any_rows() -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """`_score` as one compiled kernel for any number of rows, for evaluation.

    Only the rows are dynamic: with a dynamic vocabulary as well, the kernel would read the logits in small pieces.
    The compiler chooses the order of its sums by the first number of rows that it meets. After a restart that may be
    another number, so no training step may depend on this kernel.
    """

    def for_any_rows(logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        return _score(logits, labels, label_smoothing)  # torch.compile caches by code object: this needs its own

    compiled = torch.compile(for_any_rows)

    def score(logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        for each in (logits, labels):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        scored: tuple[Tensor, Tensor] = compiled(logits, labels, label_smoothing)
        return scored

    return score


def _score(logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Summed loss of logits [rows, vocabulary], and their gradient in their dtype; the arithmetic is in fp32."""
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
    """`total * scale` in another dtype, compiled: PyTorch's kernel for that gets a third of the memory bandwidth."""
    return (total * scale).to(dtype)


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right` in fp32, whatever the dtype of the factors."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
