"""Estimates the device and host memory that training takes on each worker, in bytes.

Model states: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
section 3.1 (`2 + 2 + K` bytes per parameter, `K = 12` for mixed-precision Adam) and figure 1 (what each stage divides
by the number of workers). Offload: Ren et al., "ZeRO-Offload" (2021), section 4, and "ZeRO-Infinity" (2021). Buffers:
DeepSpeed's configuration defaults (`reduce_bucket_size`, `stage3_max_live_parameters`, `stage3_prefetch_bucket_size`).
A GB is 10^9 bytes, as in those papers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from spotune.job.training.hyperparameters import WHOLE_MATRIX_OPTIMIZERS, Optimizer
from spotune.plan.activations import Activations, Workload, activation_bytes
from spotune.plan.architecture import Architecture
from spotune.plan.checkpoint_interval import CHECKPOINT_BYTES_PER_PARAMETER, checkpoint_bytes
from spotune.plan.parameters import TrainedParameters, trained_parameters

Offload = Literal["none", "optimizer", "parameters"]
ZeroStage = Literal[0, 1, 2, 3]

GB = 10**9
REDUCE_BUCKET_ELEMENTS = 500_000_000
LIVE_PARAMETERS = 1_000_000_000
PREFETCH_ELEMENTS = 50_000_000
STEP_ELEMENTS = 1 << 26
"""Number of gradients that the fused optimizer step holds in float32 at once."""
STREAM_ELEMENTS = 1 << 24
"""Elements of optimizer states in host memory that are copied to the device at once."""
STREAM_ELEMENT_BYTES = 12
"""A float32 master and two float32 moments."""
STREAM_SLOTS = 4
"""Pieces of that size that are on the device at once: one arrives, one is updated, one leaves, and one to spare."""
FIXED_POINT_ELEMENTS = 1 << 24
"""Number of gradients that `execution.reproducible` converts, squares or applies at once, on GPUs."""
FIXED_POINT_BYTES = 8
"""Bytes of a gradient in fixed point."""
FIXED_POINT_STEP_BYTES = 24
"""Temporary bytes per gradient that is squared or applied: three numbers of 64 bit, or more of 32."""
GPU_RUNTIME_BYTES = int(1.5 * GB)
"""Memory of a process apart from its tensors: CUDA context and kernels, NCCL channels, cuBLAS workspaces."""
CPU_RUNTIME_BYTES = int(1.2 * GB)
"""Resident size of a Python process that has imported torch, deepspeed, transformers and ray."""


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of each kind of model state.

    `optimizer_bytes` are the optimizer's states (AdamW's two moments) and, in mixed precision, float32 master weights
    (ZeRO paper, `K` is 12). `checkpoint_bytes` are master weights and states as a checkpoint contains them, in float32.
    In float32, the weights are their own master weights, unless DeepSpeed shards the optimizer: it then copies the
    worker's shard (`sharded_master_bytes`). With `fused_step`, at stages 1 to 3, the optimizer reads gradients directly
    from the buffers they were reduced to, and a single worker at stage 1 does not reduce them. DeepSpeed's own step
    copies them. With `streamed_step`, the device also updates states in host memory, at stages 1 and 2; otherwise the
    processor does. With `whole_matrices`, the optimizer updates whole matrices, which only stages 0 to 2 allow. With
    `fixed_point`, every worker sums the gradients of its micro-batches in 64-bit integers, at stages 0 to 2.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: float
    sharded_master_bytes: int = 0
    fused_step: bool = False
    streamed_step: bool = False
    checkpoint_bytes: float = CHECKPOINT_BYTES_PER_PARAMETER
    whole_matrices: bool = False
    fixed_point: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether there are float32 master weights in addition to the model's weights."""
        return self.weight_bytes < 4


FLOAT32 = Precision(weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, sharded_master_bytes=4)
FLOAT16 = Precision(weight_bytes=2, gradient_bytes=2, optimizer_bytes=12)
BFLOAT16 = replace(FLOAT16, fused_step=True, streamed_step=True)
MOMENTS_8BIT_BYTES = 2 * (1 + 4 / 256)
"""Bytes per parameter: two one-byte codes, and two float32 scales per 256 elements (docs/adr/0022)."""


NF4_BYTES = 1 / 2 + 4 / 64
"""Bytes per 4-bit weight: half a byte, and one float32 scale per 64 weights."""


WHOLE_MATRIX_STEP_BYTES = 16
"""Temporary bytes per element of the matrix that Muon or Adafactor updates: four float32 copies."""


def precision_of(
    dtype: str,
    optimizer: Optimizer = "adamw",
    trained: TrainedParameters | None = None,
    *,
    ema: bool = False,
    fixed_point: bool = False,
) -> Precision:
    """The precision for a job's `model.dtype` (float32, or 16 bit with float32 masters) and `training.optimizer`.

    `adamw8bit` keeps float32 moments for small parameters. The estimate ignores this, because they are few.

    Args:
        dtype: `model.dtype`.
        optimizer: `training.optimizer`.
        trained: decides how large the states of Muon and Adafactor are per parameter; not used by other optimizers.
        ema: whether there is a moving average of the weights.
        fixed_point: whether gradients are summed in fixed point, for `execution.reproducible: worldSize`.
    """
    precision = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}[dtype]
    if precision.streamed_step and not can_stream(optimizer, ema=ema):
        precision = replace(precision, streamed_step=False)
    if fixed_point:
        precision = replace(precision, fixed_point=True)
    if optimizer == "adamw" and not ema:
        return precision
    ema_bytes = 4 if ema else 0
    state_bytes = 4 * _states_per_parameter(optimizer, trained or TrainedParameters(1))
    on_device = MOMENTS_8BIT_BYTES if optimizer == "adamw8bit" else state_bytes
    return replace(
        precision,
        optimizer_bytes=precision.optimizer_bytes - 8 + on_device + ema_bytes,
        checkpoint_bytes=4 + state_bytes + ema_bytes,
        whole_matrices=optimizer in WHOLE_MATRIX_OPTIMIZERS,
    )


def can_stream(optimizer: Optimizer, *, ema: bool) -> bool:
    """Whether the device can update this optimizer's states in host memory; it also takes bfloat16."""
    return optimizer in ("adamw", "adamw8bit") and not ema


def _states_per_parameter(optimizer: Optimizer, trained: TrainedParameters) -> float:
    """Numbers that an optimizer keeps for a parameter, on average.

    AdamW: two moments. Schedule-free AdamW: base and second moment. Muon: one momentum for hidden matrices, AdamW's
    moments for the others. Adafactor: a factored second moment.
    """
    if optimizer == "muon":
        return 2 - trained.hidden_matrices / trained.count
    if optimizer == "adafactor":
        return trained.factored / trained.count
    return 2


@dataclass(frozen=True)
class ModelStates:
    """Weights, gradients and optimizer states of one worker, in bytes, on the device and in host memory."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of one worker, in bytes.

    Attributes:
        states: weights, gradients and optimizer states.
        activations: activations of one micro-batch.
        buffers_bytes: reduction bucket and gathered weights of stage 3.
        reduction_bytes: buckets and reduced gradients of stages 1 and 2, which replace the logits in the backward pass.
        step_bytes: float32 gradients of the worker's shard during the optimizer step, when activations are freed.
        runtime_bytes: memory of the process apart from its tensors.
        commit_bytes: host copies that checkpoints are written from (see `commit_bytes`).
        on_cpu: whether the worker runs on a CPU, so that device memory is host memory.
    """

    states: ModelStates
    activations: Activations
    buffers_bytes: int
    reduction_bytes: int
    step_bytes: int
    runtime_bytes: int
    commit_bytes: int
    on_cpu: bool = False

    @property
    def total_bytes(self) -> int:
        """Required device memory: the peak of the backward pass or of the optimizer step, whichever is larger."""
        backward = self.activations.layers_bytes + max(self.activations.working_bytes, self.reduction_bytes)
        return self.states.device_bytes + max(backward, self.step_bytes) + self.other_bytes

    @property
    def other_bytes(self) -> int:
        """Device memory for neither states nor activations; on a CPU worker also what GPUs leave to the host."""
        return (
            self.buffers_bytes
            + self.runtime_bytes
            + (self.commit_bytes + self.activations.host_bytes if self.on_cpu else 0)
        )

    @property
    def host_bytes(self) -> int:
        """Required host memory besides the device's: what is offloaded, and the page-locked copies of commits."""
        return self.states.host_bytes if self.on_cpu else self.offloaded_bytes + self.commit_bytes

    @property
    def host_peak_bytes(self) -> int:
        """Host memory of a GPU worker, also for its process, and for the weights while they are loaded."""
        return self.host_bytes + self.states.weights_bytes + CPU_RUNTIME_BYTES

    @property
    def offloaded_bytes(self) -> int:
        """Host memory for offloaded states and activations."""
        return self.states.host_bytes + self.activations.host_bytes


def model_states(
    parameters: int,
    precision: Precision,
    zero_stage: ZeroStage,
    world_size: int,
    offload: Offload = "none",
    frozen: int = 0,
    quantised: int = 0,
    *,
    whole_gradients: bool = False,
) -> ModelStates:
    """Weights, gradients and optimizer states per worker (ZeRO paper, figure 1; ZeRO-Offload for host memory).

    Args:
        parameters: number of trained parameters.
        precision: bytes per parameter.
        zero_stage: 0 shards nothing, 1 the optimizer states, 2 also the gradients, 3 also the weights.
        world_size: number of workers.
        offload: `optimizer` moves the optimizer states to host memory, and the reduced float32 gradients as well if the
            processor does the step; `parameters` (stage 3) also moves the weights.
        frozen: number of frozen parameters, which have no gradients and no optimizer states.
        quantised: number of frozen parameters in 4 bits, which no stage shards.
        whole_gradients: at stage 3, keep unsharded gradients, in addition to the reduced ones for the step.

    Raises:
        ValueError: the stage does not support this offload or quantization.
    """
    if offload != "none" and zero_stage == 0:
        raise ValueError("offload needs ZeRO stage 1 or more")
    if offload == "parameters" and zero_stage != 3:
        raise ValueError("offload of parameters needs ZeRO stage 3")
    if quantised and zero_stage == 3:
        raise ValueError("stage 3 cannot shard quantised weights")
    weights = _share((parameters + frozen - quantised) * precision.weight_bytes, world_size if zero_stage >= 3 else 1)
    weights += math.ceil(quantised * NF4_BYTES)
    sharded = zero_stage >= 2 and not precision.fixed_point
    gradients = _share(parameters * precision.gradient_bytes, world_size if sharded else 1)
    gradients += parameters * FIXED_POINT_BYTES if precision.fixed_point else 0
    gradients += parameters * precision.gradient_bytes if whole_gradients else 0
    sharded_master = precision.sharded_master_bytes if zero_stage >= 1 else 0
    optimizer = math.ceil(parameters * (precision.optimizer_bytes + sharded_master))
    optimizer = _share(optimizer, world_size if zero_stage >= 1 else 1)
    if offload == "none":
        return ModelStates(weights, gradients, optimizer)
    if steps_on_device(precision, zero_stage, offload):
        return ModelStates(weights, gradients, optimizer_bytes=0, host_bytes=optimizer)
    host = optimizer + _share(parameters * 4, world_size)
    return ModelStates(
        weights_bytes=0 if offload == "parameters" else weights,
        gradients_bytes=gradients if zero_stage < 2 else 0,
        optimizer_bytes=0,
        host_bytes=host + (weights if offload == "parameters" else 0),
    )


def steps_on_device(precision: Precision, zero_stage: ZeroStage, offload: Offload) -> bool:
    """Whether the device updates the optimizer states, wherever they are."""
    return offload == "none" or (offload == "optimizer" and zero_stage in (1, 2) and precision.streamed_step)


def commit_bytes(parameters: int, world_size: int, precision: Precision) -> int:
    """Host memory of the copy from which a worker writes checkpoints in the background (docs/adr/0016).

    A checkpoint has float32 master weights and optimizer states: 12 bytes per parameter with AdamW, at every precision
    and ZeRO stage. Each of `world_size` workers writes its shard, `ceil(12 P / W)` bytes. The copy is allocated once
    and reused.
    """
    return _share(checkpoint_bytes(parameters, precision.checkpoint_bytes), world_size)


def estimate_memory(
    architecture: Architecture,
    workload: Workload,
    precision: Precision,
    zero_stage: ZeroStage,
    world_size: int,
    *,
    offload: Offload = "none",
    gathered_layers: int = 0,
    whole_gradients: bool = False,
    trained: TrainedParameters | None = None,
    runtime_bytes: int = GPU_RUNTIME_BYTES,
    on_cpu: bool = False,
    commit_copies: int = 1,
) -> MemoryEstimate:
    """Estimate the memory of one worker that trains a model.

    `trained` limits which parameters are trained; None means all. `gathered_layers` and `whole_gradients` are for stage
    3 only (see `Layout`). With two `commit_copies`, the last complete commit stays in memory while the next is written.
    Raises ValueError as `model_states` does.
    """
    trained = trained or trained_parameters(architecture)
    count = trained.count
    states = model_states(
        count,
        precision,
        zero_stage,
        world_size,
        offload,
        trained.frozen,
        trained.quantised,
        whole_gradients=whole_gradients,
    )
    return MemoryEstimate(
        states=states,
        activations=activation_bytes(architecture, workload),
        buffers_bytes=(
            _gathered_bytes(trained, precision, offload, gathered_layers, whole_gradients) if zero_stage == 3 else 0
        ),
        reduction_bytes=_reduction_bytes(count, precision, zero_stage, world_size, offload),
        step_bytes=_step_bytes(trained, precision, zero_stage, world_size, offload),
        runtime_bytes=runtime_bytes,
        commit_bytes=commit_copies * commit_bytes(count, world_size, precision),
        on_cpu=on_cpu,
    )


def _step_bytes(
    trained: TrainedParameters, precision: Precision, zero_stage: ZeroStage, world_size: int, offload: Offload
) -> int:
    """The float32 copy of a worker's gradients for the optimizer step, and temporary copies of a whole matrix.

    DeepSpeed first concatenates the gradients into one tensor; at stage 3 it does this group by group. States in host
    memory come to the device piece by piece, with the gradients of one piece in float32.
    """
    if not steps_on_device(precision, zero_stage, offload):
        return 0
    if offload == "optimizer":
        return STREAM_ELEMENTS * (STREAM_SLOTS * STREAM_ELEMENT_BYTES + 4)
    if precision.fixed_point:
        return FIXED_POINT_STEP_BYTES * min(trained.count, FIXED_POINT_ELEMENTS)
    whole = WHOLE_MATRIX_STEP_BYTES * trained.largest_matrix if precision.whole_matrices else 0
    if zero_stage == 0:
        return whole
    parameters = trained.count
    if precision.fused_step:
        return whole or 4 * min(_share(parameters, world_size), STEP_ELEMENTS)
    return whole + _share(parameters * (4 + (precision.gradient_bytes if zero_stage < 3 else 0)), world_size)


def _reduction_bytes(
    parameters: int, precision: Precision, zero_stage: ZeroStage, world_size: int, offload: Offload
) -> int:
    """DeepSpeed's two reduction buckets at stages 1 and 2: one is filled while the other is reduced.

    At stage 1, the worker's shard of the reduced gradients exists in addition to all gradients. In fixed point there
    are no buckets, but a copy of some gradients while they are converted.
    """
    if precision.fixed_point:
        return (precision.gradient_bytes + FIXED_POINT_BYTES) * min(parameters, FIXED_POINT_ELEMENTS)
    on_device = steps_on_device(precision, zero_stage, offload)
    if zero_stage in (0, 3) or (zero_stage == 1 and world_size == 1 and precision.fused_step and on_device):
        return 0
    buckets = 2 * min(parameters, REDUCE_BUCKET_ELEMENTS) * precision.gradient_bytes
    reduced = _share(parameters * precision.gradient_bytes, world_size) if zero_stage == 1 and on_device else 0
    return buckets + reduced


def _gathered_bytes(
    trained: TrainedParameters, precision: Precision, offload: Offload, gathered_layers: int, whole_gradients: bool
) -> int:
    """At stage 3: the gradient bucket, and the weights that are gathered, prefetched or kept gathered.

    Whole gradients need no bucket, because they are reduced in place.
    """
    bucket = 0 if whole_gradients else min(trained.count, REDUCE_BUCKET_ELEMENTS)
    kept = 0 if offload == "parameters" else trained.outside_layers + gathered_layers * trained.largest_layer
    gathered = min(trained.count + trained.frozen, LIVE_PARAMETERS + PREFETCH_ELEMENTS + kept)
    return bucket * precision.gradient_bytes + gathered * precision.weight_bytes


def _share(total_bytes: int, parts: int) -> int:
    return -(-total_bytes // parts)
