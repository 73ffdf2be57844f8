"""Noise on the embeddings in training: NEFTune (Jain et al. 2023, https://arxiv.org/abs/2310.05914, algorithm 1).

Each element of an embedding gets ``alpha / sqrt(L * d)`` times a uniform number in [-1, 1]. L is the length of the
sequence in tokens, and d the size of an embedding. The formula is that of transformers' Trainer, with two differences:

- L does not count padding, and in a row of several documents it is the length of each document. So packing, compiling
  and the rows that share a micro-batch do not change the scale.
- Encoder and decoder of a sequence-to-sequence model both get noise, each with the length of its own sequence. They
  have embedding modules of their own, which share a weight. The Trainer's hook is on a third module, which T5 and BART
  never call in transformers 5: there it adds no noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spotune.errors import JobError
from spotune_trainer.data.batches import Batch


class EmbeddingNoise:
    """Adds noise to the embeddings of forward passes within `added`, and to no others.

    Args:
        model: a transformers model, with or without an adapter. Its embedding modules get a hook.
        alpha: scale of the noise, more than 0.
    """

    def __init__(self, model: Any, alpha: float) -> None:
        self._alpha = alpha
        self._is_encoder_decoder = model.config.is_encoder_decoder
        self._expected: deque[Tensor] = deque()  # lengths for each embedding that the forward pass has yet to compute
        parts = [model.get_encoder(), model.get_decoder()] if self._is_encoder_decoder else [model]
        for embedding in {part.get_input_embeddings() for part in parts}:  # one, if both parts share it
            embedding.register_forward_hook(self._add)

    @contextmanager
    def added(self, batch: Batch) -> Iterator[None]:
        """Add noise to the embeddings of one forward pass, drawn from PyTorch's default generator of the device.

        Args:
            batch: what the model is called with, on its device.

        Raises:
            JobError: the model did not call its embedding modules, so it got no noise.
        """
        self._expected.extend(_sequence_lengths(batch, with_decoder=self._is_encoder_decoder))
        try:
            yield
            if self._expected:
                raise JobError(
                    "training.neftuneNoiseAlpha: the model does not use the embeddings that it names in "
                    "get_input_embeddings(), so no noise can be added: set it to 0"
                )
        finally:
            self._expected.clear()

    def _add(self, module: torch.nn.Module, inputs: Any, embedded: Tensor) -> Tensor | None:
        """Forward hook of an embedding, ``[batch, sequence, d]``; None leaves it as it is."""
        if not self._expected:
            return None
        lengths = self._expected.popleft()  # an encoder runs before its decoder
        scale = self._alpha * torch.rsqrt(lengths * embedded.size(-1))
        return embedded + torch.empty_like(embedded).uniform_(-1, 1).mul_(scale)


def _sequence_lengths(batch: Batch, *, with_decoder: bool) -> list[Tensor]:
    """Length of the sequence that each token belongs to, for each embedding of a forward pass.

    fp32, ``[batch, 1, 1]``, or ``[batch, sequence, 1]`` for rows of several documents, where padding is a document.
    """
    device = batch.input_ids.device
    if batch.cu_seq_lens is not None:
        documents = batch.cu_seq_lens.diff()
        of_tokens = documents.repeat_interleave(documents, output_size=batch.input_ids.numel())
        return [of_tokens.view_as(batch.input_ids).float().unsqueeze(-1)]
    counts = [batch.input_lengths, batch.label_lengths] if with_decoder else [batch.input_lengths]
    return [torch.tensor(each, dtype=torch.float32, device=device).view(-1, 1, 1) for each in counts]
