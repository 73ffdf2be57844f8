"""The architecture of a model, as far as parameter and memory estimates need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["layer", "rms", "rms-float32"]
"""`layer`: weight and bias, one fused kernel. `rms`: weight only, computed in float32 and cast back. `rms-float32`: as
`rms`, but autograd also saves the float32 input or the product with the weight (T5, Gemma)."""


@dataclass(frozen=True)
class Stack:
    """A stack of equal Transformer layers (an encoder or a decoder). Sizes are numbers of elements.

    `rotated_copies`: queries, keys and values come from one projection, so rotary embeddings create copies of queries
    and keys. `extra_parameters`: parameters of the stack outside its layers.
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
        """Total width of all query heads."""
        return self.heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """Total width of all key heads; the same for the values."""
        return self.key_value_heads * self.head_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return (2 if self.norm == "layer" else 1) * self.hidden_size


@dataclass(frozen=True)
class Architecture:
    """The size of a model, as described by its `config.json`.

    Attributes:
        model_type: model family, with its name in `transformers`.
        vocabulary_size: rows of the word embedding.
        hidden_size: width of the word embedding.
        decoder: the decoder stack; of an encoder such as BERT its only stack.
        encoder: the encoder stack; None for decoder-only models.
        tied_embeddings: whether the output projection is tied to the word embedding.
        untied_when_loaded: for T5 v1.1 and mT5, `transformers` ties the output projection if the model is created from
            its configuration, and keeps it separate if the published weights contain both.
        extra_parameters: parameters outside the stacks and the word embedding.
        dropout: whether there is dropout after each sublayer.
        feed_forward_dropout: whether there is dropout inside the feed-forward.
        relative_attention: whether a learned position bias is added to the attention scores (T5).
        eager_attention_only: whether `transformers` has no fused attention for the model.
        softcapped_logits: whether the logits are soft-capped (Gemma 2).
        softcapped_scores: whether the attention scores are soft-capped, which also rules out fused attention.
        encoder_only: whether it is an encoder such as BERT, which can only have a head.
        head_outputs: outputs of the head for scores or labels that replaces the projection to the vocabulary; 0 if the
            model generates text or has no head.
        head_of_tokens: whether each token has these outputs, not the whole text.
        without_head: whether the output is that of the last layer, as for embeddings.
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
    softcapped_logits: bool = False
    softcapped_scores: bool = False
    encoder_only: bool = False
    head_outputs: int = 0
    head_of_tokens: bool = False
    without_head: bool = False

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The encoder (if any) and the decoder."""
        return (self.decoder,) if self.encoder is None else (self.encoder, self.decoder)
