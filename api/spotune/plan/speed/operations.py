"""Floating-point operations and memory traffic of a model's layers, for one sequence, by what limits them.

A product of n tokens with a matrix of P elements takes 2 n P operations (PaLM, Chowdhery et al. 2022, appendix B).
Attention takes 4 d operations for each pair of a query and a key that it looks at, in all heads of total width d.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spotune.plan.architecture import Architecture, Stack
from spotune.plan.parameters import count_parameters, layer_matrices


@dataclass(frozen=True)
class LayerWork:
    """What a forward pass of one layer computes for one sequence.

    Attributes:
        stack: the encoder or decoder of the layer.
        tokens: length of the sequence.
        product_flops: operations of the matrix products.
        last_product_flops: of these, the ones of the last matrix of the feed-forward.
        attention_flops: operations of attention; causal attention does not compute masked scores.
        scores: attention scores of all heads, in elements, masked ones included.
    """

    stack: Stack
    tokens: int
    product_flops: float
    last_product_flops: float
    attention_flops: float
    scores: int

    @property
    def matrix_elements(self) -> int:
        """Elements of the layer's matrices."""
        return sum(inputs * outputs for inputs, outputs in layer_matrices(self.stack))

    @property
    def matrix_edge_elements(self) -> int:
        """Elements that go into the layer's matrices and come out of them."""
        return self.tokens * sum(inputs + outputs for inputs, outputs in layer_matrices(self.stack))

    @property
    def query_elements(self) -> int:
        """Elements of the queries of all attentions."""
        return self.tokens * self.stack.query_size * (2 if self.stack.cross_attention else 1)

    @property
    def elementwise_elements(self) -> int:
        """Elements that the fused operations between products read and write.

        A norm with its residual sum reads two tensors and writes two, the rotary embedding reads and writes queries and
        keys, and the activation function reads its inputs and writes its output.
        """
        stack = self.stack
        widths = 4 * stack.norms_per_layer * stack.hidden_size
        widths += 2 * (stack.query_size + stack.key_value_size)
        widths += (3 if stack.gated else 2) * stack.feed_forward_size
        return self.tokens * widths


def layer_work(
    architecture: Architecture, sequence_length: int, target_length: int = 0, documents: float = 1.0
) -> Iterator[LayerWork]:
    """The work of one layer of each stack, for one sequence of tokens and, with an encoder, one target.

    The sequence has `documents` of equal length. Documents that differ take more, as attention grows with their square.
    """
    for stack in architecture.stacks:
        is_encoder = architecture.encoder_only or stack is architecture.encoder
        tokens = target_length if stack.cross_attention else sequence_length
        source_tokens = sequence_length if stack.cross_attention else 0
        # Keys and values of cross-attention are made of the encoder's output.
        from_source = 2 * stack.hidden_size * stack.key_value_size if stack.cross_attention else 0
        elements = sum(inputs * outputs for inputs, outputs in layer_matrices(stack))
        pairs = tokens * (tokens / documents / (1 if is_encoder else 2) + source_tokens)
        yield LayerWork(
            stack=stack,
            tokens=tokens,
            product_flops=2 * tokens * (elements - from_source) + 2 * source_tokens * from_source,
            last_product_flops=2 * tokens * stack.hidden_size * stack.feed_forward_size,
            attention_flops=4 * pairs * stack.query_size,
            scores=tokens * (tokens + source_tokens) * stack.heads,
        )


def model_flops(
    architecture: Architecture,
    sequence_length: int,
    target_length: int = 0,
    documents: float = 1.0,
    *,
    pretrained: bool,
    frozen: bool,
) -> float:
    """Operations of a step for one sequence, as the MFU of a run counts them (`spotune_trainer.models.flops`).

    A token takes 6 N operations (4 N if the model is frozen beside adapters) and 12 L d T. T is the length of a
    document, of which the sequence has `documents` of equal length. Recomputed layers do not count, and masked scores
    do.
    """
    counts = count_parameters(architecture, pretrained=pretrained)

    def flops(parameters: int, stack: Stack, tokens: int, attended: float) -> float:
        passes = 4 if frozen else 6
        return float(tokens * (passes * parameters + 12 * stack.layers * architecture.hidden_size * attended))

    if architecture.encoder is None:
        return flops(counts.total, architecture.decoder, sequence_length, sequence_length / documents)
    encoder = flops(counts.encoder, architecture.encoder, sequence_length, sequence_length)
    attended = target_length + sequence_length
    return encoder + flops(counts.total - counts.encoder, architecture.decoder, target_length, attended)
