"""How many parameters a model has, exactly, from its `config.json` alone."""

from __future__ import annotations

from dataclasses import dataclass

from spotune.plan.architecture import Architecture, Stack


@dataclass(frozen=True)
class ParameterCount:
    """Trainable parameters of a model by part; `output` is 0 where the output projection is the word embedding."""

    embedding: int
    encoder: int
    decoder: int
    output: int

    @property
    def total(self) -> int:
        """All parameters; a tied output projection counts once."""
        return self.embedding + self.encoder + self.decoder + self.output


def count_parameters(architecture: Architecture, *, pretrained: bool = True) -> ParameterCount:
    """The parameters of `architecture`, as `model.num_parameters()` of `transformers` gives them.

    With `pretrained` false the model is made from its configuration, which matters for T5 v1.1 and mT5 only (see
    `Architecture.untied_when_loaded`).
    """
    word_embedding = architecture.vocabulary_size * architecture.hidden_size
    untied = not architecture.tied_embeddings or (pretrained and architecture.untied_when_loaded)
    encoder = architecture.encoder
    return ParameterCount(
        embedding=word_embedding + architecture.extra_parameters,
        encoder=_stack_parameters(encoder) if encoder else 0,
        decoder=_stack_parameters(architecture.decoder),
        output=word_embedding if untied else 0,
    )


def _layer_parameters(stack: Stack) -> int:
    """Attention, cross-attention where there is one, feed-forward, norms."""
    attention = _attention_parameters(stack) * (2 if stack.cross_attention else 1)
    norms = stack.norms_per_layer * stack.norm_parameters
    head_norms = 2 * stack.head_size if stack.head_norms else 0
    return attention + _feed_forward_parameters(stack) + norms + head_norms


def _stack_parameters(stack: Stack) -> int:
    return stack.layers * _layer_parameters(stack) + stack.extra_parameters


def _attention_parameters(stack: Stack) -> int:
    query_key_value = stack.query_size + 2 * stack.key_value_size
    weights = stack.hidden_size * (query_key_value + stack.query_size)
    biases = stack.query_key_value_bias * query_key_value + stack.attention_output_bias * stack.hidden_size
    return weights + biases


def _feed_forward_parameters(stack: Stack) -> int:
    inner = (2 if stack.gated else 1) * stack.feed_forward_size
    weights = stack.hidden_size * (inner + stack.feed_forward_size)
    return weights + stack.feed_forward_bias * (inner + stack.hidden_size)
