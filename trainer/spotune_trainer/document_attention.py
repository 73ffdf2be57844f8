"""Attention within the documents of packed rows, without a mask.

A mask of rows of several documents is a tensor of [batch, 1, row, row], with which PyTorch leaves its flash kernel for
one that computes every score. Here the rows of a batch are one sequence whose documents begin where `cu_seq_lens_q`
says, as in FlashAttention (Dao 2023) for sequences of various lengths, so that no score between documents is computed.
Batches that are not packed, and evaluation, are left to PyTorch's scaled dot-product attention.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("spotune.worker")

NAME = "documents"
"""Of this attention, among those of transformers."""
MODEL_TYPES = frozenset({"gemma", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Models whose attention is causal softmax over plain scores, in a window or not."""
_LARGEST_HEAD = 256
_FIRST_CAPABILITY = (8, 0)  # Ampere: what PyTorch's flash kernel is for


def attend_within_documents(model: PreTrainedModel) -> bool:
    """Have the model attend so on packed rows, where it can on this device; whether it does."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config._attn_implementation != "sdpa":
        return False
    if getattr(config, "attention_dropout", 0.0) or _head_size(config) > _LARGEST_HEAD:
        return False
    if not _has_kernel(model.dtype):
        return False
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    logger.info("attention: packed rows by flash attention within each document")
    return True


def attends_within_documents(model: PreTrainedModel) -> bool:
    """Whether packed batches come with the starts of their documents instead of a mask."""
    return bool(model.config._attn_implementation == NAME)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer.
        query: [batch, heads, row, head size].
        key: as `query`, of fewer heads where they are shared.
        value: as `key`.
        attention_mask: of batches that are not packed.
        cu_seq_lens_q: int32 [documents + 1], where each document begins in the rows, one after the other, and the end;
            documents without a token may stand there. None: the batch is not packed.
        scaling: of the scores.
        sliding_window: tokens that a token sees, itself included; None: all before it.
        kwargs: for scaled dot-product attention.

    Returns:
        [batch, row, heads, head size], and no scores.
    """
    if cu_seq_lens_q is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    batch, heads, width, head_size = query.shape
    before = -1 if sliding_window is None or sliding_window > width else sliding_window - 1
    attended: Any = varlen_attn(
        _as_one_sequence(query),
        _as_one_sequence(key),
        _as_one_sequence(value),
        cu_seq_lens_q,
        cu_seq_lens_q,
        width,
        width,
        scale=scaling,
        window_size=(before, 0),
    )
    return attended.reshape(batch, width, heads, head_size), None


def _as_one_sequence(rows: Tensor) -> Tensor:
    """[batch, heads, row, head size] as [batch x row, heads, head size]."""
    return rows.transpose(1, 2).flatten(0, 1)


def _has_kernel(dtype: torch.dtype) -> bool:
    if dtype == torch.float32 or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= _FIRST_CAPABILITY


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
