"""From a job and its model's `config.json` to the layout that its workers run with: what the trainer asks at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spotune.job import FinetuneJob
from spotune.plan.activations import CHUNKED_LOSS_MODELS
from spotune.plan.architecture import Architecture
from spotune.plan.config_reader import SUPPORTED_MODEL_TYPES, read_architecture
from spotune.plan.layout import CPU_USABLE_FRACTION, GPU_USABLE_FRACTION, Layout, Request, Setup, choose_layout
from spotune.plan.memory import CPU_RUNTIME_BYTES, GPU_RUNTIME_BYTES, MemoryEstimate, precision_of


@dataclass(frozen=True)
class ExecutionPlan:
    """Every `auto` of a job's `execution`, resolved, but for the attention; `reason` is for people.

    `memory` is the estimate per worker, `None` where the job sets everything itself and the model is not one whose size
    can be computed.
    """

    zero_stage: int
    micro_batch_size: int
    gradient_checkpointing: bool
    compile: bool
    reason: str
    gathered_layers: int = 0
    whole_gradients: bool = False
    memory: MemoryEstimate | None = None


def resolve_execution(
    config: Mapping[str, Any], job: FinetuneJob, world_size: int, device_memory_bytes: int
) -> ExecutionPlan:
    """Resolves `execution.zeroStage`, `microBatchSize` and `gradientCheckpointing`; explicit values are respected.

    Args:
        config: the model's `config.json`.
        job: the job.
        world_size: number of workers; choose for the fewest that training goes on with (`workers.min`).
        device_memory_bytes: memory of one worker's GPU; for CPU workers its share of the machine's memory.

    Raises:
        JobError: nothing fits, or something is `auto` and the model's size cannot be computed from `config`.
    """
    request = request_of(job)
    if request.complete and not _is_known(config):
        return _plan(job, request.layout(), "as set in execution")
    choice = choose_layout(setup_of(read_architecture(config), job), world_size, device_memory_bytes, request)
    return _plan(job, choice.layout, choice.reason, choice.memory)


def resolve_compile(job: FinetuneJob) -> bool:
    """Whether layers are compiled: as set; where it is `auto`, on GPUs whose rows are packed to one length.

    Each new shape is compiled for itself, which takes tens of seconds: worth it where there is but one. Beside an
    adapter it is for those who ask for it, since at ZeRO stage 3 frozen weights cannot be gathered for compiled layers.
    """
    spec = job.spec
    if spec.execution.compile != "auto":
        return spec.execution.compile
    return spec.workers.gpus > 0 and spec.dataset.packing and spec.adapter is None


def request_of(job: FinetuneJob) -> Request:
    """What the job's `execution` sets, and what it leaves to the plan."""
    execution = job.spec.execution
    return Request(
        zero_stage=execution.zero_stage,
        micro_batch_size=execution.micro_batch_size,
        gradient_checkpointing=execution.gradient_checkpointing,
    )


def setup_of(architecture: Architecture, job: FinetuneJob) -> Setup:
    """What the job trains, as far as memory is concerned."""
    spec = job.spec
    on_cpu, compiled = spec.workers.gpus == 0, resolve_compile(job)
    target_length = spec.dataset.max_completion_length or spec.dataset.max_length
    return Setup(
        architecture=architecture,
        precision=precision_of(spec.model.dtype, spec.training.optimizer),
        global_batch_size=spec.training.global_batch_size,
        sequence_length=spec.dataset.max_length,
        target_length=target_length if architecture.encoder is not None else 0,
        pretrained=spec.model.initialise == "pretrained",
        lora_rank=spec.adapter.lora.r if spec.adapter is not None else None,
        lora_dropout=spec.adapter is not None and spec.adapter.lora.dropout > 0,
        quantised=spec.adapter is not None and spec.adapter.quantization != "none",
        offload=spec.execution.offload,
        # On the CPU, PyTorch falls back to writing the scores as soon as there is dropout or a learned bias.
        fused_attention=spec.execution.attention != "eager" and not on_cpu,
        compiled=compiled,
        # Unscaled gradients in float16 would be too small.
        chunked_loss=compiled and spec.model.dtype != "float16" and architecture.model_type in CHUNKED_LOSS_MODELS,
        runtime_bytes=CPU_RUNTIME_BYTES if on_cpu else GPU_RUNTIME_BYTES,
        usable_fraction=CPU_USABLE_FRACTION if on_cpu else GPU_USABLE_FRACTION,
        on_cpu=on_cpu,
    )


def _is_known(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in SUPPORTED_MODEL_TYPES


def _plan(job: FinetuneJob, layout: Layout, reason: str, memory: MemoryEstimate | None = None) -> ExecutionPlan:
    compiled = resolve_compile(job)
    return ExecutionPlan(
        zero_stage=layout.zero_stage,
        micro_batch_size=layout.micro_batch_size,
        gradient_checkpointing=layout.gradient_checkpointing,
        compile=compiled,
        reason=f"{reason}; layers compiled" if compiled else reason,
        gathered_layers=layout.gathered_layers,
        whole_gradients=layout.whole_gradients,
        memory=memory,
    )
