"""Computes the exact number of parameters of a model from its `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

from spotune.plan.architecture import Architecture, Stack


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model by part; `output` is 0 if the output projection is tied to the word embedding."""

    embedding: int
    encoder: int
    decoder: int
    output: int

    @property
    def total(self) -> int:
        """All parameters; a tied output projection is counted once."""
        return self.embedding + self.encoder + self.decoder + self.output


@dataclass(frozen=True)
class TrainedParameters:
    """Number of trained parameters, of frozen ones (with an adapter), and of frozen ones quantized to 4 bits.

    The other fields are set only without an adapter: `outside_layers` parameters are in the embedding and the output
    projection, `layers` is the number of encoder and decoder layers, and `largest_layer` is the parameter count of the
    largest layer. `hidden_matrices` parameters are in matrices of the layers, which Muon updates.

    `factored` is the number of elements of a factored second moment, as Adafactor keeps it: rows plus columns of each
    matrix, and all elements of each vector. `largest_matrix` is the parameter count of the largest trained matrix.
    """

    count: int
    frozen: int = 0
    quantised: int = 0
    outside_layers: int = 0
    layers: int = 0
    largest_layer: int = 0
    hidden_matrices: int = 0
    factored: int = 0
    largest_matrix: int = 0


def trained_parameters(
    architecture: Architecture, *, pretrained: bool = True, lora_rank: int | None = None, quantised: bool = False
) -> TrainedParameters:
    """The parameters to train: all or, with `lora_rank`, a head for labels and adapters on every matrix of the layers.

    With `quantised`, these matrices are stored in 4 bits.
    """
    counts = count_parameters(architecture, pretrained=pretrained)
    total = counts.total
    shapes = [(stack.layers, *matrix) for stack in architecture.stacks for matrix in layer_matrices(stack)]
    matrices = sum(layers * inputs * outputs for layers, inputs, outputs in shapes)
    if lora_rank is None:
        embeddings = 2 if counts.output and not architecture.head_outputs else 1
        edges = sum(layers * (inputs + outputs) for layers, inputs, outputs in shapes)
        edges += embeddings * (architecture.vocabulary_size + architecture.hidden_size)
        word_embedding = architecture.vocabulary_size * architecture.hidden_size
        return TrainedParameters(
            total,
            outside_layers=counts.embedding + counts.output,
            layers=sum(stack.layers for stack in architecture.stacks),
            largest_layer=max(_layer_parameters(stack) for stack in architecture.stacks),
            hidden_matrices=matrices,
            factored=edges + total - matrices - embeddings * word_embedding,
            largest_matrix=max(word_embedding, *(inputs * outputs for _, inputs, outputs in shapes)),
        )
    head = counts.output if architecture.head_outputs else 0
    return TrainedParameters(
        count_lora_parameters(architecture, lora_rank) + head,
        total,
        matrices if quantised else 0,
        factored=sum(layers * (inputs + outputs + 2 * lora_rank) for layers, inputs, outputs in shapes) + head,
        largest_matrix=max(head, lora_rank * max(max(inputs, outputs) for _, inputs, outputs in shapes)),
    )


def count_parameters(architecture: Architecture, *, pretrained: bool = True) -> ParameterCount:
    """Count the parameters of `architecture`; equals `model.num_parameters()` of `transformers`.

    With `pretrained` false the model is created from its configuration. This differs for T5 v1.1 and mT5 only (see
    `Architecture.untied_when_loaded`).
    """
    word_embedding = architecture.vocabulary_size * architecture.hidden_size
    untied = not architecture.tied_embeddings or (pretrained and architecture.untied_when_loaded)
    encoder = architecture.encoder
    projection = word_embedding if untied and not architecture.without_head else 0
    return ParameterCount(
        embedding=word_embedding + architecture.extra_parameters,
        encoder=_stack_parameters(encoder) if encoder else 0,
        decoder=_stack_parameters(architecture.decoder),
        output=_head_parameters(architecture) if architecture.head_outputs else projection,
    )


def _head_parameters(architecture: Architecture) -> int:
    """Parameters of a head for scores or labels. That of texts, on an encoder, has a dense layer below its outputs."""
    outputs, hidden = architecture.head_outputs, architecture.hidden_size
    if architecture.head_of_tokens:
        return outputs * (hidden + 1)
    return outputs * (hidden + 1) + hidden * (hidden + 1) if architecture.encoder_only else outputs * hidden


def count_lora_parameters(architecture: Architecture, rank: int) -> int:
    """Parameters of LoRA adapters on every matrix of the layers (`targetModules: all-linear`): r (in + out) each.

    This is an upper bound for fewer target modules, and for models with one fused query-key-value matrix.
    """
    return sum(
        stack.layers * rank * sum(inputs + outputs for inputs, outputs in layer_matrices(stack))
        for stack in architecture.stacks
    )


def layer_matrices(stack: Stack) -> list[tuple[int, int]]:
    """(inputs, outputs) of every matrix of one layer."""
    hidden, query, key_value = stack.hidden_size, stack.query_size, stack.key_value_size
    attention = [(hidden, query), (hidden, key_value), (hidden, key_value), (query, hidden)]
    feed_forward = [(hidden, stack.feed_forward_size)] * (2 if stack.gated else 1) + [(stack.feed_forward_size, hidden)]
    return attention * (2 if stack.cross_attention else 1) + feed_forward


def _layer_parameters(stack: Stack) -> int:
    """Parameters of one layer: attention, optional cross-attention, feed-forward and norms."""
    matrices = sum(inputs * outputs for inputs, outputs in layer_matrices(stack))
    attention_biases = _attention_biases(stack) * (2 if stack.cross_attention else 1)
    norms = stack.norms_per_layer * stack.norm_parameters
    head_norms = 2 * stack.head_size if stack.head_norms else 0
    return matrices + attention_biases + _feed_forward_biases(stack) + norms + head_norms


def _stack_parameters(stack: Stack) -> int:
    return stack.layers * _layer_parameters(stack) + stack.extra_parameters


def _attention_biases(stack: Stack) -> int:
    query_key_value = stack.query_size + 2 * stack.key_value_size
    return stack.query_key_value_bias * query_key_value + stack.attention_output_bias * stack.hidden_size


def _feed_forward_biases(stack: Stack) -> int:
    inner = (2 if stack.gated else 1) * stack.feed_forward_size
    return stack.feed_forward_bias * (inner + stack.hidden_size)
