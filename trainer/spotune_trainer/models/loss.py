"""The training loss of a micro-batch: a sum over label tokens, so that a step's mean is the same at any world size."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional
from transformers import masking_utils

from spotune_trainer.data.batches import NO_LOSS, Batch, Task, collate
from spotune_trainer.models.fused_linear_cross_entropy import loss_head
from spotune_trainer.models.packed_attention import attends_within_documents
from spotune_trainer.models.patching import replaced


def summed_loss(model: Any, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy summed over the label tokens of `batch`, in fp32.

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
        # A causal model's output at position i is about token i + 1, and that of the last one about nothing.
        labels = functional.pad(labels[:, 1:], (0, 1), value=NO_LOSS)
    head = loss_head(module)
    maskless = batch.document_starts is not None and attends_within_documents(module)
    if maskless:
        inputs["cu_seq_lens_q"] = batch.document_starts
    with nobody_looks_for_documents() if maskless or batch.position_ids is None else nullcontext():
        if head is not None:
            with head.scoring(labels, label_smoothing):
                loss: Tensor = model(**inputs).logits
            return loss
        logits = model(**inputs).logits
    return functional.cross_entropy(
        logits.reshape(-1, logits.size(-1)).float(),
        labels.reshape(-1),
        ignore_index=NO_LOSS,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def nobody_looks_for_documents() -> AbstractContextManager[None]:
    """Keep transformers from asking the device whether rows are packed, where that is known."""
    return replaced(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


def weightless_batch(task: Task) -> Batch:
    """One short row, whose loss is to be multiplied by zero: it keeps a rank without work in step with the rest."""
    row = {"input_ids": np.zeros(2, dtype=np.int64), "labels": np.zeros(2, dtype=np.int64)}
    return collate([row], task, pad_token_id=0)
