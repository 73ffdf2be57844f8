"""Estimates the seconds of one optimizer step of a GPU worker.

Each part of a step is limited by one thing: matrix products and attention by the GPU's operations per second, what is
between them and the optimizer by its memory, states on the host by the bus. Their times add up, because kernels run one
after the other. Layers that are not compiled may also wait for the processor, which launches their kernels.

How near to these limits a step comes was measured on H200s (`RATES`). Other GPUs are assumed to come as near to theirs.
Communication between workers is not counted. Between two GPUs of one node, at stages 0 to 2, it overlaps with the
backward pass (docs/adr/0090).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spotune.plan.activations import keeps_attention_output
from spotune.plan.layout import passes_per_step
from spotune.plan.memory import steps_on_device
from spotune.plan.speed.gpus import GpuSpeed
from spotune.plan.speed.operations import LayerWork, layer_work, model_flops
from spotune.plan.training_setup import Layout, TrainingSetup

LARGE_HEAD_SIZE = 96
"""Size of attention heads from which the rates of heads of 128 are used, and below it those of 64."""
ATTENTION_PASSES = 3.5
"""Operations of attention in forward and backward, in those of the forward pass: two products, and then five (Dao,
"FlashAttention-2", 2023, section 4.1)."""
CAST_BYTES = {"fp8": 7, "fp8-rowwise": 14}
"""Bytes moved for an element that is cast to 8 bits: 2 read for the scale, 2 read again, 1 written, and 2 for a
transposed copy. Scales of rows differ from those of columns, so each has a cast of its own."""
CHUNKED_LOGIT_ACCESSES = 5
"""Reads and writes of a logit by the chunked loss."""
SMALLEST_32BIT_STATES = 12
"""Bytes of master weights and 32-bit moments for a parameter, in mixed precision."""
LOGIT_BYTES = 30
"""Bytes moved for a logit by the cross-entropy of PyTorch, which computes in float32."""


@dataclass(frozen=True)
class Rates:
    """How near to its limits a step comes. `benchmarks/step_time.py` fits all but those of step_profile_before.json.

    Attributes:
        products: fraction of the peak that matrix products reach (0.71 to 0.72 in step_profile_before.json).
        attention_64, attention_128: the same for attention with heads of that size, in long rows (long_rows.json).
        attention_accesses: reads and writes by attention for an element of its queries, in forward and backward. It
            makes attention in short rows slower for each operation.
        packed_attention: time of attention within several documents of a row, in that of rows of such a length: it is
            another kernel (throughput_1_documents.json, long_rows.json).
        memory: fraction of the bandwidth that operations between products reach (0.87 to 1 in
            step_profile_before.json).
        eager: traffic of layers that are not compiled, in that of compiled ones (throughput_1_more.json).
        eager_layer_seconds: time in which the processor launches forward and backward pass of a layer that is not
            compiled (bloomz in throughput_1_examples.json, whose GPU mostly waits). It depends on the machine.
        fp8, fp8_rowwise: speed of products of 8 bits, in that of products of 16 (throughput_1_fp8.json and
            throughput_1_8B_fp8.json).
        adapter_accesses: reads and writes by an adapter, for an element that goes into its matrix or out of it, in
            forward and backward (long_rows.json, large_models.json).
        dequantization_bytes: bytes that could be moved while a weight of 4 bits is converted (large_models.json).
        update_bytes, update_8bit_bytes: the same while a parameter is updated, with 32-bit and 8-bit moments, norm and
            clipping included (kernels of the optimizer in step_profile_before.json).
        update_8bit_eager_bytes: the same with 8-bit moments if nothing is compiled: many small kernels (the T5s in
            large_models.json).
        host_bytes_per_second: how fast optimizer states come from the host, while others go back (large_models.json).
    """

    products: float = 0.72
    attention_64: float = 0.41
    attention_128: float = 0.544
    attention_accesses: float = 61
    packed_attention: float = 2.4
    memory: float = 0.9
    eager: float = 5.0
    eager_layer_seconds: float = 0.0067
    fp8: float = 1.63
    fp8_rowwise: float = 1.32
    adapter_accesses: float = 11.2
    dequantization_bytes: float = 48
    update_bytes: float = 90
    update_8bit_bytes: float = 66
    update_8bit_eager_bytes: float = 830
    host_bytes_per_second: float = 48e9


RATES = Rates()


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by what limits them, and the speed that follows.

    Attributes:
        products: matrix products.
        attention: attention.
        memory: operations between products: norms, activation functions, casts, adapters, the loss.
        launches: the GPU waits for the processor.
        optimizer: the update of the parameters.
        host_copies: copies of optimizer states on the host that take longer than the update beside them.
        tokens: tokens of the input that all workers train on in the step; of an encoder-decoder, of the encoder.
        mfu: model FLOPs utilization, 0 to 1, by the formula of a run's MFU.
    """

    products: float
    attention: float
    memory: float
    launches: float
    optimizer: float
    host_copies: float
    tokens: int
    mfu: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.products + self.attention + self.memory + self.launches + self.optimizer + self.host_copies

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all workers."""
        return self.tokens / self.seconds


def estimate_step_time(
    setup: TrainingSetup, layout: Layout, world_size: int, gpu: GpuSpeed, rates: Rates = RATES
) -> StepTime | None:
    """The time of a step of `setup` in `layout`. Every sample is counted as long as the longest.

    None where nothing was measured: on CPUs, if the processor updates the parameters, with optimizers of whole matrices
    and with gradients in fixed point. None also for layers that are not compiled at stage 3 on several workers, where
    the time in which the processor launches communication matters most.
    """
    precision = setup.precision
    if setup.on_cpu or precision.whole_matrices or precision.fixed_point:
        return None
    if layout.zero_stage == 3 and world_size > 1 and not setup.compiled:
        return None
    if not steps_on_device(precision, layout.zero_stage, setup.offload):
        return None
    micro_batches = passes_per_step(setup.global_batch_size, world_size, layout.micro_batch_size)
    samples = min(micro_batches * layout.micro_batch_size, setup.global_batch_size)
    products = attention = memory = launches = 0.0
    lengths = setup.sequence_length, setup.target_length
    for work in layer_work(setup.architecture, *lengths, setup.documents_per_row):
        again = _recomputed_fraction(setup, layout, work)
        layers = work.stack.layers
        products += samples * layers * _product_seconds(setup, work, again, gpu, rates)
        attention += samples * layers * _attention_seconds(setup, work, again, gpu, rates)
        memory += samples * layers * _memory_seconds(setup, work, again, gpu, rates)
        if setup.quantised:
            weights = micro_batches * layers * work.matrix_elements * (2 + again)
            memory += weights * rates.dequantization_bytes / gpu.memory_bytes_per_second
        if not setup.compiled:
            launches += micro_batches * layers * (1 + again / 3) * rates.eager_layer_seconds
    output_products, output_memory = _output_seconds(setup, gpu, rates)
    products, memory = products + samples * output_products, memory + samples * output_memory

    shard = setup.trained.count / (world_size if layout.zero_stage else 1)
    update = shard * _update_bytes(setup, rates) / gpu.memory_bytes_per_second
    host_bytes = shard * precision.optimizer_bytes if setup.offload != "none" else 0
    step = StepTime(
        products=products,
        attention=attention,
        memory=memory,
        launches=max(0.0, launches - products - attention - memory),
        optimizer=update,
        host_copies=max(0.0, host_bytes / rates.host_bytes_per_second - update),
        tokens=setup.global_batch_size * setup.sequence_length,
        mfu=0.0,
    )
    flops = setup.global_batch_size * model_flops(
        setup.architecture,
        *lengths,
        setup.documents_per_row,
        pretrained=setup.pretrained,
        frozen=setup.lora_rank is not None,
    )
    return replace(step, mfu=flops / (step.seconds * world_size * gpu.peak_flops))


def _recomputed_fraction(setup: TrainingSetup, layout: Layout, work: LayerWork) -> float:
    """Fraction of a stack's layers that the backward pass computes again."""
    kept = layout.kept_layers if work.stack is setup.architecture.decoder else 0
    return (work.stack.layers - kept) / work.stack.layers if layout.gradient_checkpointing else 0.0


def _passes(setup: TrainingSetup) -> int:
    """Products of a matrix: forward, gradient of the input and, unless it is frozen, gradient of the weights."""
    return 3 if setup.lora_rank is None else 2


def _product_seconds(setup: TrainingSetup, work: LayerWork, again: float, gpu: GpuSpeed, rates: Rates) -> float:
    """Seconds of a layer's products for one sample. A compiled layer is recomputed without its last product."""
    flops = _passes(setup) * work.product_flops + again * work.product_flops
    flops -= again * work.last_product_flops if setup.compiled else 0
    faster = {None: 1.0, "fp8": rates.fp8, "fp8-rowwise": rates.fp8_rowwise}[setup.fp8]
    return flops / (gpu.peak_flops * rates.products * faster)


def _attention_seconds(setup: TrainingSetup, work: LayerWork, again: float, gpu: GpuSpeed, rates: Rates) -> float:
    """Seconds of a layer's attention for one sample. It is not recomputed if its output is saved."""
    is_saved = keeps_attention_output(
        setup.sequence_length, setup.architecture.hidden_size, compiled=setup.compiled, offload=False
    )
    passes = ATTENTION_PASSES + (0 if is_saved else again)
    efficiency = rates.attention_128 if work.stack.head_size >= LARGE_HEAD_SIZE else rates.attention_64
    moved = work.query_elements * rates.attention_accesses * setup.precision.weight_bytes * passes / ATTENTION_PASSES
    seconds = passes * work.attention_flops / (gpu.peak_flops * efficiency) + moved / gpu.memory_bytes_per_second
    return seconds * (rates.packed_attention if setup.documents_per_row > 1 else 1)


def _memory_seconds(setup: TrainingSetup, work: LayerWork, again: float, gpu: GpuSpeed, rates: Rates) -> float:
    """Seconds of a layer's operations between products, for one sample; the backward pass moves twice as much."""
    architecture, element = setup.architecture, setup.precision.weight_bytes
    elements = work.elementwise_elements
    if architecture.relative_attention or architecture.eager_attention_only or not setup.fused_attention:
        elements += 2 * work.scores
    eager = 1.0 if setup.compiled else rates.eager
    bytes_moved = (3 + again) * elements * element * eager / rates.memory
    if setup.lora_rank is not None:
        bytes_moved += (1 + again / 3) * work.matrix_edge_elements * element * rates.adapter_accesses
    if setup.fp8 is not None:
        bytes_moved += work.matrix_edge_elements * CAST_BYTES[setup.fp8]
    return bytes_moved / gpu.memory_bytes_per_second


def _update_bytes(setup: TrainingSetup, rates: Rates) -> float:
    """Bytes that could be moved while a parameter is updated."""
    if not setup.precision.is_mixed or setup.precision.optimizer_bytes >= SMALLEST_32BIT_STATES:
        return rates.update_bytes
    return rates.update_8bit_bytes if setup.compiled else rates.update_8bit_eager_bytes


def _output_seconds(setup: TrainingSetup, gpu: GpuSpeed, rates: Rates) -> tuple[float, float]:
    """Seconds of the projection to the vocabulary, and of the loss, for one sample."""
    architecture = setup.architecture
    if architecture.head_outputs or architecture.without_head:
        return 0.0, 0.0
    tokens = setup.target_length if architecture.encoder is not None else setup.sequence_length
    logits = tokens * architecture.vocabulary_size
    flops = _passes(setup) * 2 * logits * architecture.hidden_size
    logit_bytes = CHUNKED_LOGIT_ACCESSES * setup.precision.weight_bytes if setup.chunked_loss else LOGIT_BYTES
    bytes_moved = logits * logit_bytes / rates.memory
    return flops / (gpu.peak_flops * rates.products), bytes_moved / gpu.memory_bytes_per_second
