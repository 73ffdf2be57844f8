"""Attention within the documents of packed rows, without a mask.

A mask of rows of several documents is a tensor of [batch, 1, row, row], with which PyTorch leaves its flash kernel for
one that computes every score. Here the rows of a batch are one sequence whose documents begin where `cu_seq_lens_q`
says, as in FlashAttention (Dao 2023) for sequences of various lengths, so that no score between documents is computed.
Batches that are not packed are left to PyTorch's scaled dot-product attention.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.attention.varlen  # registers the operator
from torch import Tensor
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
_HEAD_MULTIPLE = 8
_FIRST_CAPABILITY = (8, 0)  # Ampere: what PyTorch's flash kernel is for


def attend_within_documents(model: PreTrainedModel) -> bool:
    """Have the model attend so on packed rows, where it can on this device; whether it does."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config._attn_implementation != "sdpa":
        return False
    if getattr(config, "attention_dropout", 0.0) or not _has_kernel(model.dtype):
        return False
    if _head_size(config) > _LARGEST_HEAD or _head_size(config) % _HEAD_MULTIPLE:
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
    asked, keys, values = (_as_one_sequence(each) for each in (query, key, value))
    attended = flash_attention(asked, keys, values, cu_seq_lens_q, width, scaling, (before, 0))
    return attended.reshape(batch, width, heads, head_size), None


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Causal attention within the documents of one sequence, [tokens, heads, head size], by PyTorch's flash kernel.

    By the operator under `torch.nn.attention.varlen.varlen_attn`: that function prefers a kernel of cuDNN's in newer
    versions, which was not measured here, and takes other arguments from version to version.
    """
    is_causal = window == (-1, 0)
    output, *_ = torch.ops.torch_attn._varlen_attn(
        query, key, value, starts, starts, longest, longest, is_causal, scaling, list(window)
    )
    attended: Tensor = output
    return attended


def _as_one_sequence(rows: Tensor) -> Tensor:
    """[batch, heads, row, head size] as [batch x row, heads, head size]."""
    return rows.transpose(1, 2).flatten(0, 1)


def _has_kernel(dtype: torch.dtype) -> bool:
    if dtype == torch.float32 or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= _FIRST_CAPABILITY


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
