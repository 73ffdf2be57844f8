"""Bytes of activations that the forward pass keeps for the backward pass.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4, which
adds up what each operation of a layer saves. The sum is `s b h (34 + 5 a s / h)` for a GPT layer in 16 bit (equation
1), `34 s b h` if the attention scores are not kept (section 5, and every fused attention kernel), and `2 s b h` with
full recomputation of all layers (s: sequence length, b: micro-batch, h: hidden size, a: heads). This module extends the
sum to gated feed-forwards of any width, cross-attention, float32, and norms that compute in float32, and to tensors
that PyTorch and `transformers` save beyond the paper's kernels. A compiled layer saves only the inputs of its matrix
products and of its attention and recomputes the rest; its loss holds one chunk of logits at a time. In FP8 it
recomputes the inputs of matrices behind the two norms and of the last matrix as well, unless an adapter needs them: a
cast to 8 bits stands between. Weights are cast again in the backward pass, so nothing is added for them.

`tests/api/plan/test_measured_activations.py` compares the formulas with the tensors that autograd saves,
`tests/api/plan/test_measured.py` and `tests/api/plan/test_measured_throughput.py` with peaks measured on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotune.plan.architecture import Architecture, Stack
from spotune.plan.parameters import layer_matrices

DROPOUT_MASK_BYTES = 1
FLOAT32_BYTES = 4
CHUNK_LOGITS = 1 << 28
"""Number of logits that the compiled loss holds at once: 512 MiB in 16 bit, enough to keep a GPU busy."""

LAYERS_ON_DEVICE = 2
"""Layers whose saved tensors are on the device at once with offload: one is copied while another is computed."""

CHUNKED_LOSS_MODELS = frozenset(
    {"bloom", "gemma", "gpt2", "gpt_neox", "llama", "mistral", "mt5", "phi3", "qwen2", "qwen3", "t5"}
)
"""Model types whose logits are the plain output of the projection; others cap, scale or bias them."""


@dataclass(frozen=True)
class Workload:
    """One micro-batch of one worker.

    Attributes:
        micro_batch_size: samples per forward and backward pass.
        sequence_length: tokens per sample; for encoder-decoder models, of the encoder.
        target_length: tokens per sample of the decoder of an encoder-decoder model; ignored otherwise.
        bytes_per_element: 2 for bfloat16 and float16, 4 for float32.
        gradient_checkpointing: whether layers are recomputed in the backward pass.
        kept_layers: with it, number of layers at the end of the model that are not recomputed.
        saves_attention: with it, whether recomputed layers save the output of fused attention.
        offload: with it, whether what recomputed layers save is in host memory until then.
        fused_attention: whether kernels never write attention scores to memory (FlashAttention, memory-efficient SDPA).
        compiled: whether layers are compiled.
        fp8: whether the matrix products of layers are computed from 8-bit floats.
        chunked_loss: whether the loss is computed from one chunk of logits at a time.
        lora_rank: rank of the adapters on every matrix of the layers; None: no adapters.
        lora_dropout: whether adapters apply dropout to their input.
    """

    micro_batch_size: int
    sequence_length: int
    target_length: int = 0
    bytes_per_element: int = 2
    gradient_checkpointing: bool = False
    kept_layers: int = 0
    saves_attention: bool = False
    offload: bool = False
    fused_attention: bool = True
    compiled: bool = False
    fp8: bool = False
    chunked_loss: bool = False
    lora_rank: int | None = None
    lora_dropout: bool = False


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one micro-batch at the peak between forward and backward.

    `layers_bytes` is saved across the whole model. `working_bytes` is temporary: the larger of the logits with their
    loss and, with gradient checkpointing, the layer that is being recomputed, as far as the kept layers have not left
    memory for it. `host_bytes` are saved in host memory.
    """

    layers_bytes: int
    working_bytes: int
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Saved and temporary bytes."""
        return self.layers_bytes + self.working_bytes


def activation_bytes(architecture: Architecture, workload: Workload) -> Activations:
    """Activation bytes of one micro-batch, by the formulas in the module docstring."""
    layer_bytes = [_layer_bytes(architecture, stack, workload) for stack in architecture.stacks]
    outside = _embedding_and_output_bytes(architecture, workload)
    logits = logits_bytes(architecture, workload)
    gradients = [_gradient_bytes(architecture, stack, workload) for stack in architecture.stacks]
    kept_gradients = max(gradients) - outside
    if workload.gradient_checkpointing:
        recomputed = [
            (stack.layers - (workload.kept_layers if stack is architecture.decoder else 0))
            * _recomputed_layer_bytes(architecture, stack, workload)
            for stack in architecture.stacks
        ]
        kept = workload.kept_layers * layer_bytes[-1]
        saved, moved = sum(recomputed) + kept + outside, 0
        if workload.offload:
            on_device = [
                min(stack.layers, LAYERS_ON_DEVICE) * _recomputed_layer_bytes(architecture, stack, workload)
                for stack in architecture.stacks
            ]
            moved = sum(recomputed)
            saved = min(moved, max(on_device)) + kept + outside
        again = [
            size
            - kept
            + (gradient + _adapter_products_bytes(architecture, stack, workload) - outside if gradient else 0)
            for stack, size, gradient in zip(architecture.stacks, layer_bytes, gradients, strict=True)
        ]
        return Activations(saved, max(logits, kept_gradients if kept else 0, *again), moved)
    full = [stack.layers * size for stack, size in zip(architecture.stacks, layer_bytes, strict=True)]
    return Activations(sum(full) + outside, max(logits, kept_gradients))


def logits_bytes(architecture: Architecture, workload: Workload) -> int:
    """Bytes of the logits and their loss at the start of the backward pass.

    Korthikanti et al. count 4 bytes per logit (section 4.3). PyTorch's cross-entropy holds three float32 tensors at its
    peak: the log-probabilities, their gradient and the gradient of the logits. A soft cap also saves its output. The
    chunked loss holds one chunk of logits and its gradient, and the gradients of the hidden states and of the
    projection's weights.
    """
    tokens = _tokens(architecture, architecture.decoder, workload)
    if architecture.without_head:
        return tokens * architecture.decoder.hidden_size * FLOAT32_BYTES  # the output, from which embeddings are made
    if architecture.head_outputs:  # of each token, before the last one's is taken; the loss of words needs all
        loss_bytes = 3 * FLOAT32_BYTES if architecture.head_of_tokens else 0
        return tokens * architecture.head_outputs * (workload.bytes_per_element + loss_bytes)
    if workload.chunked_loss:
        hidden, vocabulary = architecture.decoder.hidden_size, architecture.vocabulary_size
        chunk = min(tokens, CHUNK_LOGITS // vocabulary) * vocabulary
        gradients = tokens * hidden * workload.bytes_per_element + vocabulary * hidden * FLOAT32_BYTES
        return 2 * chunk * workload.bytes_per_element + gradients
    cap_bytes = workload.bytes_per_element if architecture.softcapped_logits else 0
    return tokens * architecture.vocabulary_size * (cap_bytes + 3 * FLOAT32_BYTES)


def _gradient_bytes(architecture: Architecture, stack: Stack, workload: Workload) -> int:
    """Temporary bytes of a compiled layer's backward pass; by then what was saved outside of the layers is freed.

    They are two gradients of the feed-forward's width and two of the layer's. Counted in what compiled layers allocate
    on a CPU (docs/adr/0072). 0 for other layers, which free what they saved operator by operator.
    """
    widths = 2 * (stack.feed_forward_size + stack.hidden_size) if workload.compiled else 0
    return _tokens(architecture, stack, workload) * workload.bytes_per_element * widths


def _adapter_products_bytes(architecture: Architecture, stack: Stack, workload: Workload) -> int:
    """More temporary bytes where a compiled layer with adapters is recomputed: it adds products of base and adapter."""
    widths = 2 * stack.feed_forward_size + stack.hidden_size if workload.lora_rank is not None else 0
    return _tokens(architecture, stack, workload) * workload.bytes_per_element * widths


def keeps_attention_output(row_tokens: int, hidden_size: int, *, compiled: bool, offload: bool) -> bool:
    """Whether recomputed layers save the output of attention instead of computing it again.

    An element of it costs about as many multiplications as a row has tokens, and one of a projection's output as many
    as the model is wide. Where the ratio is 4, attention takes a quarter of a layer's multiplications. Compiled layers
    save it in any case. Others do not offload it.
    """
    return compiled or (row_tokens >= 4 * hidden_size and not offload)


def _recomputed_layer_bytes(architecture: Architecture, stack: Stack, workload: Workload) -> int:
    """Saved bytes of a recomputed layer: its input, and the output and softmax denominators of fused attention."""
    tokens = _tokens(architecture, stack, workload)
    size = tokens * stack.hidden_size * workload.bytes_per_element
    is_fused = workload.fused_attention and not (architecture.eager_attention_only or architecture.softcapped_scores)
    if workload.saves_attention and is_fused and not architecture.relative_attention:
        size += tokens * (stack.query_size * workload.bytes_per_element + stack.heads * FLOAT32_BYTES)
    return size


def _tokens(architecture: Architecture, stack: Stack, workload: Workload) -> int:
    is_target = architecture.encoder is not None and stack.cross_attention
    return workload.micro_batch_size * (workload.target_length if is_target else workload.sequence_length)


def _layer_bytes(architecture: Architecture, stack: Stack, workload: Workload) -> int:
    tokens = _tokens(architecture, stack, workload)
    length = tokens // max(workload.micro_batch_size, 1)
    if workload.compiled and not stack.cross_attention and not architecture.relative_attention:
        recomputed = 0
        if workload.fp8 and workload.lora_rank is None:
            recomputed = stack.feed_forward_size + 2 * stack.hidden_size
        return tokens * workload.bytes_per_element * (_compiled_elements(stack) - recomputed)
    total = tokens * (_norm_bytes(stack, workload) + _feed_forward_bytes(architecture, stack, workload))
    total += _attention_bytes(architecture, stack, workload, tokens, tokens, length)
    if architecture.relative_attention:
        # Every layer saves its own copy of the learned position bias, [batch, heads, queries, keys].
        total += tokens * length * stack.heads * workload.bytes_per_element
    if stack.cross_attention:
        source_tokens = workload.micro_batch_size * workload.sequence_length
        total += _attention_bytes(architecture, stack, workload, tokens, source_tokens, workload.sequence_length)
    if workload.lora_rank is not None:
        total += tokens * _adapter_bytes(stack, workload, workload.lora_rank)
    return total


def _adapter_bytes(stack: Stack, workload: Workload, rank: int) -> int:
    """Additional bytes per token with adapters: the tensor between an adapter's two matrices, dropout output and mask.

    The base weights are frozen, so the inputs of their matrices are saved only because the adapters need them. With
    dropout, adapters save the dropout's output instead. RMS norms do not save the factor of their frozen weights.
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
    """Saved elements per token of a compiled layer.

    They are the layer's input, the attention's output and the sum of both; queries, keys and values; and the
    feed-forward. Grouped keys and values are saved repeated to the number of query heads, as without compilation.
    """
    return 3 * stack.hidden_size + 3 * stack.query_size + (3 if stack.gated else 2) * stack.feed_forward_size


def _norm_bytes(stack: Stack, workload: Workload) -> int:
    """Bytes per token: the input of each norm; RMS norms also save a float32 copy and the normalised values."""
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
    """Bytes of the projections' input, queries, keys, values, output, dropout mask, and scores if they are kept.

    The output counts twice: as returned by the kernel, and as the input of the next projection. Grouped keys and values
    are saved repeated to the number of query heads.
    """
    element = workload.bytes_per_element
    total = tokens * element * (stack.hidden_size + 3 * stack.query_size)
    total += key_tokens * element * 2 * stack.query_size
    if stack.rotated_copies:
        total += tokens * element * (stack.query_size + stack.key_value_size)
    total += tokens * stack.hidden_size * (DROPOUT_MASK_BYTES if architecture.dropout else 0)
    if architecture.eager_attention_only or architecture.softcapped_scores or not workload.fused_attention:
        total += tokens * key_length * stack.heads * _score_bytes(architecture, workload)
    return total


def _score_bytes(architecture: Architecture, workload: Workload) -> int:
    """Bytes per attention score: the softmax and, with dropout, its mask and output (section 4.1: `5 a s^2 b`).

    `transformers` computes the softmax in float32 and saves a copy in the model's precision.
    """
    element = workload.bytes_per_element
    softmax = FLOAT32_BYTES + (element if element != FLOAT32_BYTES else 0)
    softmax += element if architecture.softcapped_scores else 0
    return softmax + ((DROPOUT_MASK_BYTES + element) if architecture.dropout else 0)


def _feed_forward_bytes(architecture: Architecture, stack: Stack, workload: Workload) -> int:
    """Bytes per token: the input, the tensors around the activation function, and the dropout masks."""
    element = workload.bytes_per_element
    total = element * (stack.hidden_size + _inner_tensors(stack) * stack.feed_forward_size)
    if architecture.dropout:
        total += stack.hidden_size * DROPOUT_MASK_BYTES
    if architecture.feed_forward_dropout:
        total += stack.feed_forward_size * (DROPOUT_MASK_BYTES + element)
    return total


def _inner_tensors(stack: Stack) -> int:
    """Number of saved tensors of the inner width: those of the activation function and the last projection's input.

    ReLU saves only its output, which is also the projection's input. Fused functions save their input. `gelu_new` is
    implemented with elementary operations in `transformers` and saves four tensors. A gate adds both factors of its
    product.
    """
    own = {"relu": 0, "gelu_new": 4}.get(stack.activation, 1)
    return own + 1 + (2 if stack.gated else 0)


def _embedding_and_output_bytes(architecture: Architecture, workload: Workload) -> int:
    """Bytes of the embeddings' dropout, each stack's final norm and the output projection's input (section 4.3)."""
    total = 0
    for stack in architecture.stacks:
        kept = workload.bytes_per_element + 2 * FLOAT32_BYTES + (DROPOUT_MASK_BYTES if architecture.dropout else 0)
        total += _tokens(architecture, stack, workload) * stack.hidden_size * kept
    return total
