"""Packed attention: each token attends within its own document, without a mask.

A row of packed training data holds several documents. A mask for it is a tensor [batch, 1, row, row], and with any mask
PyTorch replaces its flash kernel by one that computes every score. Here all rows of a batch are passed as one sequence
with the cumulative lengths of its documents (`cu_seq_lens_q`), as FlashAttention takes sequences of different lengths
(Dao 2023). Scores between documents are not computed. Batches that are not packed go to PyTorch's scaled dot-product
attention (SDPA).
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.attention.varlen  # registers the operator
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
logger = logging.getLogger("spotune.worker")

ATTENTION_NAME = "documents"
"""Name under which this attention is registered with transformers."""
MODEL_TYPES = frozenset({"gemma", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Models with plain causal softmax attention, with or without a sliding window."""
CUDNN_FROM_TOKENS = 8192
"""Length from which rows of one document use cuDNN's attention on GPUs that have it (`benchmarks/long_rows.py`)."""
_MAX_HEAD_SIZE = 256
_HEAD_SIZE_MULTIPLE = 8
_FIRST_CAPABILITY = (8, 0)  # Ampere: the minimum for PyTorch's flash kernel
_CUDNN_CAPABILITY = (9, 0)  # Hopper, for which cuDNN has kernels of its own


def enable_packed_attention(model: PreTrainedModel) -> bool:
    """Switch the model to packed attention if model and device support it; returns whether they do."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config._attn_implementation != "sdpa":
        return False
    if getattr(config, "attention_dropout", 0.0) or not _has_kernel(model.dtype):
        return False
    if _head_size(config) > _MAX_HEAD_SIZE or _head_size(config) % _HEAD_SIZE_MULTIPLE:
        return False
    AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    model.set_attn_implementation(ATTENTION_NAME)
    logger.info("attention: flash attention within each document of packed rows")
    return True


def uses_packed_attention(model: PreTrainedModel) -> bool:
    """Whether the model takes packed batches with `cu_seq_lens_q` instead of a mask."""
    return bool(model.config._attn_implementation == ATTENTION_NAME)


def fastest_kernel(row_tokens: int) -> AbstractContextManager[None]:
    """Within it, SDPA without a mask prefers the kernel that is fastest for rows of one document of this length.

    cuDNN's backward pass is not deterministic, so with `execution.deterministic` it is not used.
    """
    if (
        row_tokens < CUDNN_FROM_TOKENS
        or not torch.cuda.is_available()
        or torch.cuda.get_device_capability() < _CUDNN_CAPABILITY
        or torch.are_deterministic_algorithms_enabled()
    ):
        return nullcontext()
    return sdpa_kernel(_CUDNN_FIRST, set_priority=True)


def packed_attention_forward(
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
    """Attention, with the signature that transformers calls.

    Args:
        module: the attention layer.
        query: [batch, heads, row, head size].
        key: like `query`; with grouped-query attention it has fewer heads.
        value: like `key`.
        attention_mask: for batches that are not packed.
        cu_seq_lens_q: int32 [documents + 1]: where each document begins in the concatenated rows, and the end of the
            last one. Empty documents are allowed. None: the batch is not packed.
        scaling: factor of the scores; None: 1 / sqrt(head size).
        sliding_window: number of tokens that a token attends to, itself included; None: all before it.
        kwargs: passed to SDPA.

    Returns:
        Output [batch, row, heads, head size], and None instead of attention weights.
    """
    if cu_seq_lens_q is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    batch, heads, width, head_size = query.shape
    left_window = -1 if sliding_window is None or sliding_window > width else sliding_window - 1
    queries, keys, values = (_as_one_sequence(each) for each in (query, key, value))
    attended = flash_attention(queries, keys, values, cu_seq_lens_q, width, scaling, (left_window, 0))
    return attended.reshape(batch, width, heads, head_size), None


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    max_seq_len: int,
    scaling: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Causal attention within the documents of one sequence, by PyTorch's flash kernel.

    It calls the operator below `torch.nn.attention.varlen.varlen_attn`. The arguments of that function change from
    version to version, and newer versions prefer a cuDNN kernel, which is not measured here.

    Args:
        query: [tokens, heads, head size].
        key: likewise.
        value: likewise.
        cu_seq_lens: int32 [documents + 1].
        max_seq_len: upper bound of the documents' lengths.
        scaling: factor of the scores; None: 1 / sqrt(head size).
        window: numbers of tokens before and after a token that it attends to; -1: no limit.

    Returns:
        [tokens, heads, head size].
    """
    is_causal = window == (-1, 0)
    output, *_ = torch.ops.torch_attn._varlen_attn(
        query, key, value, cu_seq_lens, cu_seq_lens, max_seq_len, max_seq_len, is_causal, scaling, list(window)
    )
    attended: Tensor = output
    return attended


def _as_one_sequence(rows: Tensor) -> Tensor:
    """[batch, heads, row, head size] -> [batch x row, heads, head size]."""
    return rows.transpose(1, 2).flatten(0, 1)


def _has_kernel(dtype: torch.dtype) -> bool:
    if dtype == torch.float32 or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= _FIRST_CAPABILITY


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
