"""Sequences that decode together, and their padded key/value cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.generation.logits_process import LogitsProcessorList

from spotune_serve.engine.base import (
    FinishReason,
    GeneratedToken,
    GenerationError,
    GenerationRequest,
    TokenChunk,
)
from spotune_serve.engine.grammar import AnswerGrammar
from spotune_serve.engine.model import LoadedModel
from spotune_serve.engine.sampling import log_probabilities, next_token


@dataclass(eq=False)
class Sequence:
    """A request in the engine.

    Attributes:
        request: what was asked for.
        limit: maximum number of new tokens, those of earlier replicas included.
        start: ids that the decoder's sequence starts with: the prompt, or the start token of an encoder-decoder model.
        encoder_length: number of tokens that the encoder reads; 0 for causal models.
        stop_token_ids: tokens that end the sequence.
        processors: see `GenerationSettings.logits_processors`.
        deliver: takes each chunk, or the error that ends the sequence.
        grammar: which tokens may follow; None: all.
        generated: all new tokens so far, those of earlier replicas included.
        aborted: whether the consumer has left; set by any thread.
    """

    request: GenerationRequest
    limit: int
    start: tuple[int, ...]
    encoder_length: int
    stop_token_ids: frozenset[int]
    processors: LogitsProcessorList
    deliver: Callable[[TokenChunk | GenerationError], None]
    grammar: AnswerGrammar | None = None
    generated: list[int] = field(default_factory=list)
    aborted: bool = False

    def __post_init__(self) -> None:
        self.generated = list(self.request.generated)
        self._counts = Counter(self.generated)

    @property
    def decoder_ids(self) -> list[int]:
        """All ids of the decoder's sequence. In a batch, all but the last are cached."""
        return [*self.start, *self.generated]

    @property
    def length(self) -> int:
        """Number of ids of the decoder's sequence."""
        return len(self.start) + len(self.generated)

    @property
    def max_length(self) -> int:
        """The length at which the sequence ends at the latest."""
        return len(self.start) + self.limit

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends here; None if it goes on."""
        if self.generated and self.generated[-1] in self.stop_token_ids:
            return "stop"
        if self.grammar is not None and self.grammar.is_complete:
            return "stop"
        return "length" if len(self.generated) >= self.limit else None

    def extend(self, logits: Tensor, likeliest: int) -> TokenChunk:
        """Choose and append the next token.

        Args:
            logits: fp32 [vocabulary]; not changed.
            likeliest: their argmax.

        Raises:
            ValueError: no token can be chosen.
        """
        params = self.request.sampling
        plain = not (self.processors or params.logit_bias or params.presence_penalty or params.frequency_penalty)
        if params.temperature == 0 and params.logprobs is None and plain and self.grammar is None:
            token = GeneratedToken(likeliest)
        else:
            token = self._choose(logits)
        self.generated.append(token.token)
        self._counts[token.token] += 1
        if self.grammar is not None:
            self.grammar.accept(token.token)
        return TokenChunk((token,), self.finish_reason)

    def _choose(self, logits: Tensor) -> GeneratedToken:
        params = self.request.sampling
        processed = logits
        if self.processors:
            ids: Any = torch.tensor([self.decoder_ids], device=logits.device)
            processed = self.processors(ids, logits[None].clone())[0]
        row = processed.cpu().numpy().astype(np.float64)
        if self.grammar is not None:
            row[~self.grammar.allowed()] = -np.inf
            if row.max() == -np.inf:
                raise ValueError("the model's generation settings forbid every token that the answer's grammar allows")
        token = next_token(row, params, self._counts, len(self.generated))
        if params.logprobs is None:
            return GeneratedToken(token)
        raw = logits.cpu().numpy().astype(np.float64)
        return GeneratedToken(token, *log_probabilities(raw, token, params.logprobs))


class DecodingBatch:
    """Sequences of one adapter, with one row each in the caches, padded on the left.

    Args:
        model: decodes the batch.
        adapter: name of the adapter; empty for the base model.

    Attributes:
        adapter: see above.
        sequences: one per row.
    """

    def __init__(self, model: LoadedModel, adapter: str) -> None:
        self.adapter = adapter
        self.sequences: list[Sequence] = []
        self._model = model
        self._caches: list[DynamicCache] = []

    def accepts(self, sequence: Sequence) -> bool:
        """Whether the sequence can decode with the others: same adapter and, without padding, same length."""
        if sequence.request.adapter != self.adapter:
            return False
        return self._model.can_pad or all(other.length == sequence.length + 1 for other in self.sequences)

    def add(self, sequence: Sequence, caches: list[DynamicCache]) -> None:
        """Append a row for a sequence that was prefilled and extended by one token."""
        self.sequences.append(sequence)
        if len(self.sequences) == 1:
            self._caches = caches
            return
        for cache, new in zip(self._caches, caches, strict=True):
            layers: list[tuple[Any, Any]] = list(zip(cache.layers, new.layers, strict=True))
            for layer, new_layer in layers:
                layer.keys = _append_row(layer.keys, new_layer.keys)
                layer.values = _append_row(layer.values, new_layer.values)

    def keep(self, kept: Items[Sequence]) -> None:
        """Remove the rows of all other sequences, and the padding that they leave."""
        if len(kept) == len(self.sequences):
            return
        rows = [row for row, sequence in enumerate(self.sequences) if sequence in kept]
        self.sequences = [self.sequences[row] for row in rows]
        if not rows:
            self._caches = []
            return
        index = torch.tensor(rows, device=self._model.device)
        for cache, lengths in zip(self._caches, self._lengths(), strict=False):
            layers: list[Any] = cache.layers
            for layer in layers:
                layer.keys = _select_rows(layer.keys, index, max(lengths))
                layer.values = _select_rows(layer.values, index, max(lengths))

    def decode(self) -> Tensor:
        """fp32 logits [batch, vocabulary] after the last token of each sequence, which joins the caches."""
        self._model.activate(self.adapter)
        lengths, encoder_lengths = self._lengths()
        mask = _mask([length + 1 for length in lengths], self._model.device)
        encoder_mask = _mask(encoder_lengths, self._model.device) if self._model.seq2seq else None
        tokens = [sequence.generated[-1] for sequence in self.sequences]
        return self._model.decode(tokens, mask, encoder_mask, self._caches)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens with keys and values, without padding."""
        return sum(map(sum, self._lengths()))

    def reserved_tokens(self, *more: Sequence) -> int:
        """Maximum size of the caches in tokens, with padding, if the given sequences join."""
        sequences = [*self.sequences, *more]
        longest = max(sequence.max_length for sequence in sequences)
        return len(sequences) * (longest + max(sequence.encoder_length for sequence in sequences))

    def _lengths(self) -> tuple[list[int], list[int]]:
        """Cached tokens of each row: of the sequence, and of the encoder's output."""
        return (
            [sequence.length - 1 for sequence in self.sequences],
            [sequence.encoder_length for sequence in self.sequences],
        )


def _mask(lengths: Items[int], device: torch.device) -> Tensor:
    """1 for the last `length` of each row, 0 for the padding before [batch, longest]."""
    longest = max(lengths)
    positions = torch.arange(longest, device=device)[None]
    return (positions >= longest - torch.tensor(lengths, device=device)[:, None]).long()


def _append_row(batch: Any, row: Any) -> Tensor:
    """Keys or values [batch, heads, length, size] and those of one more row, both padded to the longer length."""
    length = max(batch.size(2), row.size(2))
    return torch.cat([pad(part, (0, 0, length - part.size(2), 0)) for part in (batch, row)])


def _select_rows(batch: Any, rows: Tensor, length: int) -> Tensor:
    """Some rows of keys or values [batch, heads, length, size], and of those the last `length` tokens."""
    selected: Tensor = batch[:, :, batch.size(2) - length :].index_select(0, rows)
    return selected
