"""What the memory arithmetic needs to know of a model: its one or two stacks of layers and what is around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["layer", "rms", "rms-float32"]
"""`layer`: weight and bias, one fused kernel. `rms`: weight only, computed in float32 and cast back. `rms-float32`: the
same, but the input or the product with the weight is kept too (T5, Gemma)."""


@dataclass(frozen=True)
class Stack:
    """A stack of equal Transformer layers (an encoder or a decoder). Sizes are in elements.

    `rotated_copies`: one projection makes queries, keys and values together, and the rotated queries and keys are
    copies beside it. `extra_parameters` are those beside the layers.
    """

    layers: int
    hidden_size: int
    heads: int
    key_value_heads: int
    head_size: int
    feed_forward_size: int
    norm: Norm
    norms_per_layer: int = 2
    activation: str = "gelu"
    gated: bool = False
    cross_attention: bool = False
    query_key_value_bias: bool = False
    attention_output_bias: bool = False
    feed_forward_bias: bool = False
    head_norms: bool = False
    rotated_copies: bool = False
    extra_parameters: int = 0

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together; the values have the same."""
        return self.key_value_heads * self.head_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return (2 if self.norm == "layer" else 1) * self.hidden_size


@dataclass(frozen=True)
class Architecture:
    """What a `config.json` says about the size of a model.

    Attributes:
        model_type: the family, by its name in `transformers`.
        vocabulary_size: rows of the word embedding.
        hidden_size: width of the word embedding.
        decoder: the stack that predicts.
        encoder: the stack that reads the source; None for decoder-only models.
        tied_embeddings: the output projection is the word embedding.
        untied_when_loaded: T5 v1.1 and mT5, whose output projection `transformers` ties when the model is made from its
            configuration, and keeps separate when the published weights bring both.
        extra_parameters: those beside the stacks and the word embedding.
        dropout: there is dropout after each sublayer.
        feed_forward_dropout: and within the feed-forward.
        relative_attention: a learned position bias is added to the attention scores (T5).
        eager_attention_only: `transformers` has no fused attention for it.
        capped_logits: the logits go through a soft cap (Gemma 2).
        capped_scores: the attention scores do, for which there is no fused attention either.
    """

    model_type: str
    vocabulary_size: int
    hidden_size: int
    decoder: Stack
    encoder: Stack | None = None
    tied_embeddings: bool = True
    untied_when_loaded: bool = False
    extra_parameters: int = 0
    dropout: bool = False
    feed_forward_dropout: bool = False
    relative_attention: bool = False
    eager_attention_only: bool = False
    capped_logits: bool = False
    capped_scores: bool = False

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The encoder, if there is one, and the decoder."""
        return (self.decoder,) if self.encoder is None else (self.encoder, self.decoder)
