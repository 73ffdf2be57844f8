"""Cross-entropy of a micro-batch, and the forward pass that objectives share.

The loss is a sum over label tokens, not a mean: the mean over a whole step is then the same at any world size.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional
from transformers import masking_utils

from spotune_trainer.data.batches import NO_LOSS, Batch, Task, collate
from spotune_trainer.models.fused_linear_cross_entropy import loss_head
from spotune_trainer.models.packed_attention import fastest_kernel, uses_packed_attention
from spotune_trainer.models.patching import patched


def summed_loss(model: Any, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy in fp32, summed over the label tokens of `batch`.

    Args:
        model: a transformers model or a DeepSpeed engine around one.
        batch: `input_ids`, `attention_mask` [batch, sequence] and `labels` [batch, target sequence].
        label_smoothing: share of the probability spread over the vocabulary (Szegedy et al. 2016, section 7).

    Returns:
        Scalar tensor; divide by the step's number of label tokens for the mean.
    """
    module = getattr(model, "module", model)
    inputs = batch.model_inputs()
    labels = inputs.pop("labels")
    inputs["use_cache"] = False
    if module.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = module.prepare_decoder_input_ids_from_labels(labels)
    else:
        # A causal model predicts token i + 1 at position i, and nothing at the last position.
        labels = functional.pad(labels[:, 1:], (0, 1), value=NO_LOSS)
    head = loss_head(module)
    if head is not None:
        with head.returning_loss(labels, label_smoothing):
            return run_model(model, batch, inputs)
    logits = run_model(model, batch, inputs)
    return functional.cross_entropy(
        logits.reshape(-1, logits.size(-1)).float(),
        labels.reshape(-1),
        ignore_index=NO_LOSS,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def run_model(model: Any, batch: Batch, inputs: Mapping[str, Any]) -> Tensor:
    """The logits of a forward pass, ``[batch, sequence, vocabulary]``. Documents of a row do not attend to each other.

    Args:
        model: a transformers model or a DeepSpeed engine around one.
        batch: the micro-batch.
        inputs: its inputs for the model.
    """
    module = getattr(model, "module", model)
    uses_varlen_kernel = batch.cu_seq_lens is not None and uses_packed_attention(module)
    varlen = {"cu_seq_lens_q": batch.cu_seq_lens} if uses_varlen_kernel else {}
    with (
        skip_packing_detection() if uses_varlen_kernel or batch.position_ids is None else nullcontext(),
        fastest_kernel(batch.input_ids.size(1)) if batch.attention_mask is None else nullcontext(),
    ):
        logits: Tensor = model(**inputs, **varlen).logits
    return logits


def skip_packing_detection() -> AbstractContextManager[None]:
    """Keep transformers from searching the position ids for packed rows: the host would wait for the GPU's answer."""
    return patched(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


def zero_weight_batch(task: Task) -> Batch:
    """One short row for a rank that has no samples left. Its loss is multiplied by zero.

    The rank so takes part in the collectives of the step.
    """
    row = {"input_ids": np.zeros(2, dtype=np.int64), "labels": np.zeros(2, dtype=np.int64)}
    return collate([row], task, pad_token_id=0)
