"""Bytes of activations that the forward pass keeps for the backward pass.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4: what
each operation of a layer saves. It sums to `s b h (34 + 5 a s / h)` for a GPT layer in 16 bit (equation 1), to
`34 s b h` where the attention scores are not kept (section 5, and every fused attention kernel), and to `2 s b h` with
full recomputation (s: sequence length, b: micro-batch, h: hidden size, a: heads). The same sum is written here for
other layers: gated feed-forwards of any width, cross-attention, float32, norms that compute in float32; and for what
PyTorch and `transformers` save beyond the paper's kernels. A compiled layer keeps what its products of matrices and its
attention need and computes what lies between them again, and its loss holds one chunk of logits.
`tests/api/plan/test_measured_activations.py` compares it with the tensors that are really saved,
`tests/api/plan/test_measured.py` and `tests/api/plan/test_measured_throughput.py` with peaks measured on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotune.plan.architecture import Architecture, Stack
from spotune.plan.parameters import layer_matrices

DROPOUT_MASK_BYTES = 1
FLOAT32_BYTES = 4
CHUNK_LOGITS = 1 << 28
"""Logits that the compiled loss holds at once: 512 MiB in 16 bit, large enough for a GPU to be busy with."""

CHUNKED_LOSS_MODELS = frozenset(
    {"bloom", "gemma", "gpt2", "gpt_neox", "llama", "mistral", "mt5", "phi3", "qwen2", "qwen3", "t5"}
)
"""Models whose logits are what the output projection gives; others cap or scale them, or add to them."""


@dataclass(frozen=True)
class Workload:
    """One micro-batch of one worker.

    Attributes:
        micro_batch_size: samples per forward and backward pass.
        sequence_length: tokens of a sample; for encoder-decoder models those of the encoder.
        target_length: tokens of the decoder of an encoder-decoder model; ignored otherwise.
        bytes_per_element: 2 for bfloat16 and float16, 4 for float32.
        gradient_checkpointing: recompute each layer in the backward pass.
        fused_attention: attention scores are never written to memory (FlashAttention, memory-efficient SDPA).
        compiled: layers are compiled.
        chunked_loss: and the loss, which is computed from a chunk of logits at a time.
        lora_rank: of adapters beside every matrix of the layers.
        lora_dropout: what they are given passes through dropout.
    """

    micro_batch_size: int
    sequence_length: int
    target_length: int = 0
    bytes_per_element: int = 2
    gradient_checkpointing: bool = False
    fused_attention: bool = True
    compiled: bool = False
    chunked_loss: bool = False
    lora_rank: int | None = None
    lora_dropout: bool = False


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one micro-batch at the fullest moment, between forward and backward.

    `layers_bytes` is what is saved across the whole model. `working_bytes` is the larger of what comes and goes: the
    logits with their loss, or (with gradient checkpointing) the one layer that is being recomputed.
    """

    layers_bytes: int
    working_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.layers_bytes + self.working_bytes


def activation_bytes(architecture: Architecture, workload: Workload) -> Activations:
    """What one micro-batch keeps, in bytes, by the formulas of the module's docstring."""
    layer_bytes = [_layer_bytes(architecture, stack, workload) for stack in architecture.stacks]
    outside = _embedding_and_output_bytes(architecture, workload)
    logits = logits_bytes(architecture, workload)
    if workload.gradient_checkpointing:
        inputs = [
            stack.layers * _tokens(architecture, stack, workload) * stack.hidden_size * workload.bytes_per_element
            for stack in architecture.stacks
        ]
        return Activations(sum(inputs) + outside, max(logits, *layer_bytes))
    full = [stack.layers * size for stack, size in zip(architecture.stacks, layer_bytes, strict=True)]
    return Activations(sum(full) + outside, logits)


def logits_bytes(architecture: Architecture, workload: Workload) -> int:
    """Logits and their loss at the start of the backward pass, in bytes.

    Korthikanti et al. count 4 bytes per logit (section 4.3). PyTorch's cross-entropy holds more at its peak, all in
    float32: the log-probabilities, their gradient and the gradient of the logits. A soft cap keeps its output, too.
    In chunks: a chunk of logits and its gradient, and the gradients of the hidden states and the projection's weights.
    """
    tokens = _tokens(architecture, architecture.decoder, workload)
    if workload.chunked_loss:
        hidden, vocabulary = architecture.decoder.hidden_size, architecture.vocabulary_size
        chunk = min(tokens, CHUNK_LOGITS // vocabulary) * vocabulary
        gradients = tokens * hidden * workload.bytes_per_element + vocabulary * hidden * FLOAT32_BYTES
        return 2 * chunk * workload.bytes_per_element + gradients
    cap_bytes = workload.bytes_per_element if architecture.capped_logits else 0
    return tokens * architecture.vocabulary_size * (cap_bytes + 3 * FLOAT32_BYTES)


def _tokens(architecture: Architecture, stack: Stack, workload: Workload) -> int:
    is_target = architecture.encoder is not None and stack.cross_attention
    return workload.micro_batch_size * (workload.target_length if is_target else workload.sequence_length)


def _layer_bytes(architecture: Architecture, stack: Stack, workload: Workload) -> int:
    tokens = _tokens(architecture, stack, workload)
    length = tokens // max(workload.micro_batch_size, 1)
    if workload.compiled and not stack.cross_attention and not architecture.relative_attention:
        return tokens * workload.bytes_per_element * _compiled_elements(stack)
    total = tokens * (_norm_bytes(stack, workload) + _feed_forward_bytes(architecture, stack, workload))
    total += _attention_bytes(architecture, stack, workload, tokens, tokens, length)
    if architecture.relative_attention:
        # Every layer keeps its own copy of the learned position bias, [batch, heads, queries, keys].
        total += tokens * length * stack.heads * workload.bytes_per_element
    if stack.cross_attention:
        source_tokens = workload.micro_batch_size * workload.sequence_length
        total += _attention_bytes(architecture, stack, workload, tokens, source_tokens, workload.sequence_length)
    if workload.lora_rank is not None:
        total += tokens * _adapter_bytes(stack, workload, workload.lora_rank)
    return total


def _adapter_bytes(stack: Stack, workload: Workload, rank: int) -> int:
    """Per token: between the two matrices of each adapter, and what dropout makes of its input, with the mask.

    What is beside them is frozen: inputs of its matrices are not kept but as those of adapters, so before dropout not
    at all, and what RMS norms multiply by their weights is not kept either.
    """
    element, matrices = workload.bytes_per_element, layer_matrices(stack)
    total = len(matrices) * rank * element
    if stack.norm != "layer":
        total -= stack.norms_per_layer * stack.hidden_size * element
    if workload.lora_dropout:
        total += sum(inputs for inputs, _ in matrices) * (element + DROPOUT_MASK_BYTES)
        total -= (2 * stack.hidden_size + stack.query_size + stack.feed_forward_size) * element
    return total


def _compiled_elements(stack: Stack) -> int:
    """Per token: the layer's input, the attention's output and the sum of both; queries, keys and values; feed-forward.

    Grouped keys and values are saved repeated to the number of query heads, as without a compiler.
    """
    return 3 * stack.hidden_size + 3 * stack.query_size + (3 if stack.gated else 2) * stack.feed_forward_size


def _norm_bytes(stack: Stack, workload: Workload) -> int:
    """Per token: the input of each norm; RMS norms add the float32 copy and the normalised values."""
    element = workload.bytes_per_element
    kept = {
        "layer": element,
        "rms": FLOAT32_BYTES + element,
        "rms-float32": 2 * FLOAT32_BYTES,
    }[stack.norm]
    head_norms = kept * (stack.query_size + stack.key_value_size) if stack.head_norms else 0
    return stack.norms_per_layer * kept * stack.hidden_size + head_norms


def _attention_bytes(
    architecture: Architecture, stack: Stack, workload: Workload, tokens: int, key_tokens: int, key_length: int
) -> int:
    """Input of the projections, queries, keys, values, output, dropout mask, and scores where they are kept.

    The output counts twice, as the kernel leaves it and as the next projection reads it; grouped keys and values are
    saved repeated to the number of query heads.
    """
    element = workload.bytes_per_element
    total = tokens * element * (stack.hidden_size + 3 * stack.query_size)
    total += key_tokens * element * 2 * stack.query_size
    if stack.rotated_copies:
        total += tokens * element * (stack.query_size + stack.key_value_size)
    total += tokens * stack.hidden_size * (DROPOUT_MASK_BYTES if architecture.dropout else 0)
    if architecture.eager_attention_only or architecture.capped_scores or not workload.fused_attention:
        total += tokens * key_length * stack.heads * _score_bytes(architecture, workload)
    return total


def _score_bytes(architecture: Architecture, workload: Workload) -> int:
    """Per attention score: the softmax, with dropout its mask and its output (section 4.1: `5 a s^2 b`).

    `transformers` computes the softmax in float32 and keeps a copy in the model's precision.
    """
    element = workload.bytes_per_element
    softmax = FLOAT32_BYTES + (element if element != FLOAT32_BYTES else 0)
    softmax += element if architecture.capped_scores else 0
    return softmax + ((DROPOUT_MASK_BYTES + element) if architecture.dropout else 0)


def _feed_forward_bytes(architecture: Architecture, stack: Stack, workload: Workload) -> int:
    """Per token: the input, the tensors around the activation function, the dropout masks."""
    element = workload.bytes_per_element
    total = element * (stack.hidden_size + _inner_tensors(stack) * stack.feed_forward_size)
    if architecture.dropout:
        total += stack.hidden_size * DROPOUT_MASK_BYTES
    if architecture.feed_forward_dropout:
        total += stack.feed_forward_size * (DROPOUT_MASK_BYTES + element)
    return total


def _inner_tensors(stack: Stack) -> int:
    """Saved tensors of the inner width: the activation function's own and the input of the last projection.

    ReLU saves only its output, which is that input; fused functions save their input; `gelu_new` is written out in
    elementary operations by `transformers` and saves four. A gate adds the other factor and the product's input.
    """
    own = {"relu": 0, "gelu_new": 4}.get(stack.activation, 1)
    return own + 1 + (2 if stack.gated else 0)


def _embedding_and_output_bytes(architecture: Architecture, workload: Workload) -> int:
    """Dropout of the embeddings, the final norm of each stack and the input of the output projection (section 4.3)."""
    total = 0
    for stack in architecture.stacks:
        kept = workload.bytes_per_element + 2 * FLOAT32_BYTES + (DROPOUT_MASK_BYTES if architecture.dropout else 0)
        total += _tokens(architecture, stack, workload) * stack.hidden_size * kept
    return total
