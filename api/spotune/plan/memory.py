"""Bytes of device and host memory that training takes on each worker.

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

from spotune.plan.activations import Activations, Workload, activation_bytes
from spotune.plan.architecture import Architecture
from spotune.plan.checkpoint_interval import checkpoint_bytes
from spotune.plan.parameters import TrainedParameters, trained_parameters

Offload = Literal["none", "optimizer", "parameters"]
ZeroStage = Literal[0, 1, 2, 3]

GB = 10**9
REDUCE_BUCKET_ELEMENTS = 500_000_000
LIVE_PARAMETERS = 1_000_000_000
PREFETCH_ELEMENTS = 50_000_000
STEP_ELEMENTS = 1 << 26
"""Parameters whose gradients are in float32 at once where the step takes them from where they are."""
GPU_RUNTIME_BYTES = int(1.5 * GB)
"""CUDA context and kernels, NCCL's channels, cuBLAS workspaces: what a process holds beside its tensors."""
CPU_RUNTIME_BYTES = int(1.2 * GB)
"""Resident size of a Python process that has imported torch, deepspeed, transformers and ray."""


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of each kind of model state.

    `optimizer_bytes` are Adam's two moments and, in mixed precision, the float32 master weights (ZeRO paper: K = 12).
    In float32 the weights are their own master, until DeepSpeed shards the optimizer: it then works on a copy of the
    worker's part (`sharded_master_bytes`). `steps_in_place`: at stages 1 to 3 the optimizer takes gradients from where
    they were reduced to, and at stage 1 a worker that is alone does not reduce them; DeepSpeed makes copies of them.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: float
    sharded_master_bytes: int = 0
    steps_in_place: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether there are master weights beside those that the model computes with."""
        return self.weight_bytes < 4


FLOAT32 = Precision(weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, sharded_master_bytes=4)
FLOAT16 = Precision(weight_bytes=2, gradient_bytes=2, optimizer_bytes=12)
BFLOAT16 = replace(FLOAT16, steps_in_place=True)
BYTES_OF_8BIT_MOMENTS = 2 * (1 + 4 / 256)
"""Two codes of a byte, and two scales in float32 for every 256 elements (docs/adr/0022)."""


NF4_BYTES = 1 / 2 + 4 / 64
"""Of a weight in 4 bits: half a byte, and a scale in float32 for every 64."""


def precision_of(dtype: str, optimizer: str = "adamw") -> Precision:
    """The precision of a job's `model.dtype` (float32, or 16 bit with float32 masters) and `training.optimizer`.

    That `adamw8bit` keeps float32 moments of small parameters is left out: they are few.
    """
    precision = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}[dtype]
    if optimizer == "adamw":
        return precision
    return replace(precision, optimizer_bytes=precision.optimizer_bytes - 8 + BYTES_OF_8BIT_MOMENTS)


@dataclass(frozen=True)
class ModelStates:
    """Weights, gradients and optimizer states of one worker, in bytes, on the device and in host memory."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """What lies on the device."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one worker at its fullest moment, in bytes.

    `buffers_bytes`: of stage 3, its bucket and gathered weights. `reduction_bytes`: of stages 1 and 2, buckets and
    reduced gradients, which are there once the backward pass has left the logits behind. `step_bytes`: the float32
    gradients of the worker's part while the optimizer steps; activations are gone by then. Only the largest counts.
    `runtime_bytes`: what the process holds beside its tensors. `commit_bytes`: the copy in host memory that a commit is
    written from (see `commit_bytes`). `on_cpu`: the worker's device is the host itself.
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
        """Device memory that is needed."""
        backward = self.activations.layers_bytes + max(self.activations.working_bytes, self.reduction_bytes)
        return self.states.device_bytes + max(backward, self.step_bytes) + self.other_bytes

    @property
    def other_bytes(self) -> int:
        """Device memory that holds neither states nor activations; on a CPU worker commits are copied within it."""
        return self.buffers_bytes + self.runtime_bytes + (self.commit_bytes if self.on_cpu else 0)

    @property
    def host_bytes(self) -> int:
        """Host memory that is needed beside the device's: offloaded states, and the page-locked copy of a commit."""
        return self.states.host_bytes + (0 if self.on_cpu else self.commit_bytes)


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
    """Weights, gradients and optimizer states per worker (ZeRO paper, figure 1; ZeRO-Offload for the host's part).

    Args:
        parameters: trainable parameters of the model.
        precision: bytes per parameter.
        zero_stage: 0 divides nothing, 1 the optimizer states, 2 also the gradients, 3 also the weights.
        world_size: number of workers.
        offload: `optimizer` moves the optimizer states, and from stage 2 the reduced gradients in float32, to the host;
            `parameters` (stage 3) also the weights.
        frozen: parameters that are not trained, beside an adapter: weights without gradients and optimizer states.
        quantised: of these in 4 bits, which no stage divides.
        whole_gradients: stage 3 does not divide the gradients; the reduced ones are beside them for the step.

    Raises:
        ValueError: this stage cannot offload that.
    """
    if offload != "none" and zero_stage == 0:
        raise ValueError("offload needs ZeRO stage 1 or more")
    if offload == "parameters" and zero_stage != 3:
        raise ValueError("offload of parameters needs ZeRO stage 3")
    if quantised and zero_stage == 3:
        raise ValueError("stage 3 cannot shard quantised weights")
    weights = _share((parameters + frozen - quantised) * precision.weight_bytes, world_size if zero_stage >= 3 else 1)
    weights += math.ceil(quantised * NF4_BYTES)
    gradients = _share(parameters * precision.gradient_bytes, world_size if zero_stage >= 2 else 1)
    gradients += parameters * precision.gradient_bytes if whole_gradients else 0
    sharded_master = precision.sharded_master_bytes if zero_stage >= 1 else 0
    optimizer = math.ceil(parameters * (precision.optimizer_bytes + sharded_master))
    optimizer = _share(optimizer, world_size if zero_stage >= 1 else 1)
    if offload == "none":
        return ModelStates(weights, gradients, optimizer)
    host = optimizer + _share(parameters * 4, world_size)
    return ModelStates(
        weights_bytes=0 if offload == "parameters" else weights,
        gradients_bytes=gradients if zero_stage < 2 else 0,
        optimizer_bytes=0,
        host_bytes=host + (weights if offload == "parameters" else 0),
    )


def commit_bytes(parameters: int, world_size: int) -> int:
    """Host memory of the copy that a worker's commits are written from while training goes on (docs/adr/0016).

    A commit is float32 master weights and Adam's two moments, 12 bytes per parameter at every precision and ZeRO stage,
    of which each of `world_size` workers writes its part: `ceil(12 P / W)` bytes, taken once and kept.
    """
    return _share(checkpoint_bytes(parameters), world_size)


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
) -> MemoryEstimate:
    """Memory of one worker that trains a model, or as many parameters as `trained` says, with Adam.

    At stage 3 so many layers stay gathered. Raises ValueError as `model_states` does.
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
        step_bytes=0 if zero_stage == 0 or offload != "none" else _step_bytes(count, precision, zero_stage, world_size),
        runtime_bytes=runtime_bytes,
        commit_bytes=commit_bytes(count, world_size),
        on_cpu=on_cpu,
    )


def _step_bytes(parameters: int, precision: Precision, zero_stage: ZeroStage, world_size: int) -> int:
    """A worker's gradients once more in float32 for the step, of which DeepSpeed first makes one tensor.

    At stage 3 it does so with some of them after the others.
    """
    if precision.steps_in_place:
        return 4 * min(_share(parameters, world_size), STEP_ELEMENTS)
    return _share(parameters * (4 + (precision.gradient_bytes if zero_stage < 3 else 0)), world_size)


def _reduction_bytes(
    parameters: int, precision: Precision, zero_stage: ZeroStage, world_size: int, offload: Offload
) -> int:
    """DeepSpeed's buckets of stages 1 and 2, of which one fills while the other is on its way.

    At stage 1 the worker's part of the reduced gradients comes beside the whole.
    """
    if zero_stage in (0, 3) or (zero_stage == 1 and world_size == 1 and precision.steps_in_place and offload == "none"):
        return 0
    buckets = 2 * min(parameters, REDUCE_BUCKET_ELEMENTS) * precision.gradient_bytes
    reduced = _share(parameters * precision.gradient_bytes, world_size) if zero_stage == 1 and offload == "none" else 0
    return buckets + reduced


def _gathered_bytes(
    trained: TrainedParameters, precision: Precision, offload: Offload, gathered_layers: int, whole_gradients: bool
) -> int:
    """At stage 3 the gradient bucket, and the weights that are gathered and prefetched, or stay gathered.

    Whole gradients are reduced from where they are.
    """
    bucket = 0 if whole_gradients else min(trained.count, REDUCE_BUCKET_ELEMENTS)
    kept = 0 if offload == "parameters" else trained.outside_layers + gathered_layers * trained.largest_layer
    gathered = min(trained.count + trained.frozen, LIVE_PARAMETERS + PREFETCH_ELEMENTS + kept)
    return bucket * precision.gradient_bytes + gathered * precision.weight_bytes


def _share(total_bytes: int, parts: int) -> int:
    return -(-total_bytes // parts)
