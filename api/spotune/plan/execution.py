"""Resolves the `auto` values of a job's `execution` section from the model's `config.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from spotune.job import FinetuneJob, WorkersSpec
from spotune.plan.activations import CHUNKED_LOSS_MODELS
from spotune.plan.architecture import Architecture
from spotune.plan.config_reader import ENCODER_MODEL_TYPES, SUPPORTED_MODEL_TYPES, read_architecture
from spotune.plan.layout import LayoutRequest, ModelTooLargeError, choose_layout, commit_copies, memory_with_copies
from spotune.plan.memory import CPU_RUNTIME_BYTES, GPU_RUNTIME_BYTES, MemoryEstimate, Precision, ZeroStage, precision_of
from spotune.plan.parameters import TrainedParameters
from spotune.plan.training_setup import CPU_USABLE_FRACTION, GPU_USABLE_FRACTION, Layout, TrainingSetup

COMPILE_SECONDS = 40.0
"""What compiling costs a run at most: a first start on an H200 compiles for 15 to 40 s (ADR 24)."""
SECONDS_SAVED = (1 / 56_099 - 1 / 77_501) / 1.1e9
"""What compiled layers save per token and parameter: 1.1 billion parameters on one H200 went from 56,099 to 77,501
tokens per second (docs/benchmarks.md). Slower devices save more."""


@dataclass(frozen=True)
class ExecutionPlan:
    """A job's `execution` section with all `auto` values resolved, except attention; `reason` is for display.

    `memory` is the estimate per worker. It is `None` if the job sets all fields and the model type is not supported by
    the plan. `fits` is false only for a layout that the user has set completely.
    """

    zero_stage: ZeroStage
    micro_batch_size: int
    gradient_checkpointing: bool
    compile: bool
    reason: str
    gathered_layers: int = 0
    whole_gradients: bool = False
    kept_layers: int = 0
    offload_activations: bool = False
    memory: MemoryEstimate | None = None
    fits: bool = True

    @property
    def layout(self) -> Layout:
        """How the work is distributed over the workers."""
        return Layout(
            self.zero_stage,
            self.micro_batch_size,
            self.gradient_checkpointing,
            self.gathered_layers,
            self.whole_gradients,
            self.kept_layers,
            self.offload_activations,
        )


def resolve_execution(
    config: Mapping[str, Any], job: FinetuneJob, world_size: int, device_memory_bytes: int
) -> ExecutionPlan:
    """Resolve `execution.zeroStage`, `microBatchSize` and `gradientCheckpointing`; explicit values are kept.

    Args:
        config: the model's `config.json`.
        job: the job.
        world_size: number of workers to plan for: the minimum that training continues with.
        device_memory_bytes: memory of one worker's GPU; for CPU workers, its share of the machine's memory.

    Raises:
        ModelTooLargeError: no layout fits.
        JobError: a value is `auto` and the model type in `config` is not supported, or values contradict each other.
    """
    request = layout_request(job, world_size)
    if request.complete and not _is_known(config):
        return _plan(job, request.layout(), "as set in execution")
    choice = choose_layout(training_setup(read_architecture(config), job), world_size, device_memory_bytes, request)
    return replace(_plan(job, choice.layout, choice.reason, choice.memory), fits=choice.fits)


@dataclass(frozen=True)
class MinimumPlan:
    """What `workers.min` stands for, and the plan for it.

    Attributes:
        world_size: smallest number of workers that training continues with.
        execution: the plan for that number, which more workers use too.
        second_copy_from: number of workers from which each keeps a second commit in memory, if
            `checkpoint.memoryCopies` is auto; None if it fits on no number of the job's workers.
        peer_copy_from: number of workers from which each has memory for a commit of another node, if
            `checkpoint.peerCopy` is auto; None likewise.
    """

    world_size: int
    execution: ExecutionPlan
    second_copy_from: int | None = None
    peer_copy_from: int | None = None


def resolve_minimum(config: Mapping[str, Any], job: FinetuneJob, device_memory_bytes: int) -> MinimumPlan:
    """Resolve `workers.min` together with `execution`. auto: the smallest number of pods on which the model fits.

    Args:
        config: the model's `config.json`.
        job: the job.
        device_memory_bytes: as in `resolve_execution`.

    Raises:
        ModelTooLargeError: the model does not fit on the minimum; for auto, on `workers.count` pods.
        JobError: as in `resolve_execution`.
    """
    workers = job.spec.workers
    *smaller, last = workers.world_sizes if workers.min == "auto" else (workers.min_world_size,)
    for world_size in smaller:
        with suppress(ModelTooLargeError):
            execution = resolve_execution(config, job, world_size, device_memory_bytes)
            if execution.fits:
                return _with_copies(config, job, MinimumPlan(world_size, execution), device_memory_bytes)
    minimum = MinimumPlan(last, resolve_execution(config, job, last, device_memory_bytes))
    return _with_copies(config, job, minimum, device_memory_bytes)


def _with_copies(
    config: Mapping[str, Any], job: FinetuneJob, minimum: MinimumPlan, device_memory_bytes: int
) -> MinimumPlan:
    if not _is_known(config):
        return minimum
    setup, layout = training_setup(read_architecture(config), job), minimum.execution.layout
    sizes = [size for size in job.spec.workers.world_sizes if size >= minimum.world_size]

    def first_fitting(copies: int, sizes: Iterable[int]) -> int | None:
        fitting = (size for size in sizes if memory_with_copies(setup, size, device_memory_bytes, layout, copies))
        return next(fitting, None)

    asked = job.spec.checkpoint.memory_copies
    copies = commit_copies(2 if asked == "auto" else asked, peer_copy=True)
    on_several_nodes = [size for size in sizes if _can_copy_to_peer(job, size)]
    return replace(
        minimum, second_copy_from=first_fitting(2, sizes), peer_copy_from=first_fitting(copies, on_several_nodes)
    )


def _can_copy_to_peer(job: FinetuneJob, world_size: int) -> bool:
    """Whether so many workers are on several nodes, and have commits in memory that they can copy."""
    return job.spec.checkpoint.memory_copies != 0 and world_size > max(1, job.spec.workers.gpus)


def resolve_compile(job: FinetuneJob) -> bool:
    """Resolve `execution.compile`. `auto` means: on GPUs, if rows are packed and all parameters are trained, or in FP8.

    Each new input shape is compiled separately, which takes tens of seconds, and packed rows have only one shape. With
    an adapter it has to be requested, because at ZeRO stage 3 frozen weights cannot be gathered for compiled layers.
    FP8 is always compiled on GPUs: the casts of matrices to 8 bits are as slow as what they save if they are not fused.
    """
    spec = job.spec
    if spec.execution.compile != "auto":
        return spec.execution.compile
    return spec.workers.gpus > 0 and (spec.execution.is_fp8 or (spec.dataset.packing and spec.adapter is None))


def saved_by_compiling(config: Mapping[str, Any], job: FinetuneJob, total_steps: int) -> float | None:
    """Seconds that compiled layers save in a whole run on `workers.count` workers; None if the model is not known.

    It depends on the job, the model and the number of steps alone, so that all starts of a job find the same.

    Args:
        config: the model's `config.json`.
        job: the job.
        total_steps: optimizer steps of the whole run.
    """
    if not _is_known(config):
        return None
    spec = job.spec
    tokens = total_steps * spec.training.global_batch_size * spec.dataset.max_length / spec.workers.world_size
    return tokens * training_setup(read_architecture(config), job).trained.count * SECONDS_SAVED


def layout_request(job: FinetuneJob, world_size: int) -> LayoutRequest:
    """The layout fields of the job's `execution` section, and the number of commits in memory of each worker."""
    execution = job.spec.execution
    return LayoutRequest(
        zero_stage=execution.zero_stage,
        micro_batch_size=execution.micro_batch_size,
        gradient_checkpointing=execution.gradient_checkpointing,
        offload_activations=_offload_activations(job),
        memory_copies=job.spec.checkpoint.memory_copies,
        peer_copy=job.spec.checkpoint.peer_copy if _can_copy_to_peer(job, world_size) else False,
    )


def _offload_activations(job: FinetuneJob) -> Literal["auto"] | bool:
    """`execution.offloadActivations`. auto does not offload on CPUs, where it saves no memory."""
    asked = job.spec.execution.offload_activations
    return False if asked == "auto" and job.spec.workers.gpus == 0 else asked


def training_setup(architecture: Architecture, job: FinetuneJob) -> TrainingSetup:
    """The inputs of the memory plan for a job."""
    spec = job.spec
    on_cpu, compiled, objective = spec.workers.gpus == 0, resolve_compile(job), spec.training.objective
    target_length = spec.dataset.max_completion_length or spec.dataset.max_length
    computed = spec.execution.precision
    setup = TrainingSetup(
        architecture=replace(
            architecture,
            head_outputs=(len(spec.dataset.labels) or 1) if spec.has_head else 0,
            head_of_tokens=objective == "tokenClassification",
            without_head=objective == "embedding",
        ),
        precision=precision_of(spec.model.dtype),
        global_batch_size=spec.training.global_batch_size,
        sequence_length=spec.dataset.max_length * _documents_of_a_row(job),
        target_length=target_length if architecture.encoder is not None else 0,
        pretrained=spec.model.initialise == "pretrained",
        lora_rank=spec.adapter.lora.r if spec.adapter is not None else None,
        lora_dropout=spec.adapter is not None and spec.adapter.lora.dropout > 0,
        quantised=spec.adapter is not None and spec.adapter.quantization != "none",
        offload=spec.execution.offload,
        # On CPUs, PyTorch's attention materialises the scores if there is dropout or a learned bias.
        fused_attention=spec.execution.attention != "eager" and not on_cpu,
        compiled=compiled,
        fp8=computed if computed == "fp8" or computed == "fp8-rowwise" else None,
        # Not for float16: the chunked loss computes gradients without loss scaling, and they would underflow.
        chunked_loss=compiled
        and objective == "sft"
        and spec.model.dtype != "float16"
        and architecture.model_type in CHUNKED_LOSS_MODELS,
        runtime_bytes=CPU_RUNTIME_BYTES if on_cpu else GPU_RUNTIME_BYTES,
        usable_fraction=CPU_USABLE_FRACTION if on_cpu else GPU_USABLE_FRACTION,
        on_cpu=on_cpu,
        host_memory_bytes=None if on_cpu else _host_memory_bytes(spec.workers),
    )
    return replace(setup, precision=job_precision(job, setup.trained))


def _host_memory_bytes(workers: WorkersSpec) -> int | None:
    """Memory of a pod's Ray container for each of its GPUs; None if the job does not say."""
    amounts = workers.resources.limits | workers.resources.requests
    return int(amounts["memory"].value / workers.gpus) if "memory" in amounts else None


def job_precision(job: FinetuneJob, trained: TrainedParameters) -> Precision:
    """Bytes per parameter of a job that trains these parameters."""
    training = job.spec.training
    return precision_of(
        job.spec.model.dtype,
        training.optimizer,
        trained,
        ema=training.ema_decay > 0,
        fixed_point=job.spec.execution.reproducible == "worldSize",
    )


def _documents_of_a_row(job: FinetuneJob) -> int:
    """Documents of a row that go through the model together."""
    match job.spec.training.objective:
        case "sft" | "kto" | "classification" | "tokenClassification":  # kto's mismatched one goes through it alone
            return 1
        case "embedding":
            return 3 if job.spec.dataset.negative else 2
        case _:
            return 2


def _is_known(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in (*SUPPORTED_MODEL_TYPES, *ENCODER_MODEL_TYPES)


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
        kept_layers=layout.kept_layers,
        offload_activations=layout.offload_activations,
        memory=memory,
    )
