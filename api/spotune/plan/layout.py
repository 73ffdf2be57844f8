"""Chooses ZeRO stage, micro-batch size and gradient checkpointing for a device and a number of workers.

The lowest ZeRO stage that fits wins, because every stage communicates at least as much as the one below it (ZeRO
paper, section 7). Within a stage, gradient checkpointing is used only where the micro-batch would be too small to keep
a device busy without it, since it costs another forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from spotune.errors import JobError
from spotune.job.execution import LOWEST_STAGE
from spotune.plan.activations import Workload
from spotune.plan.architecture import Architecture
from spotune.plan.memory import (
    GB,
    GPU_RUNTIME_BYTES,
    MemoryEstimate,
    Offload,
    Precision,
    ZeroStage,
    estimate_memory,
)
from spotune.plan.parameters import TrainedParameters, trained_parameters

GPU_USABLE_FRACTION = 0.92
"""Part of a GPU's memory that is planned for; the rest is for fragmentation and what no formula knows."""
CPU_USABLE_FRACTION = 0.7
"""Part of a machine's memory that CPU workers plan for: Ray's object store, the page cache and people need the rest."""
BUSY_TOKENS = 2048
"""Tokens per forward pass from which a device is taken to be busy."""
PASS_TOKENS: Final[Mapping[ZeroStage, int]] = {0: 256, 1: 256, 2: 256, 3: 1024}
"""Tokens that a device could train in what a pass takes beside its arithmetic, about: gradients are added up, and at
stage 3 weights are gathered and gradients reduced (some hundred on two H200s, docs/benchmarks.md; more over a network).
"""
MOST_WORKERS_TRIED = 1024
_MORE_OFFLOAD: Final[Mapping[Offload, tuple[Offload, ...]]] = {
    "none": ("optimizer", "parameters"),
    "optimizer": ("parameters",),
    "parameters": (),
}
"""What could be kept in host memory besides, least first."""


@dataclass(frozen=True)
class Setup:
    """What is trained, as far as memory is concerned.

    Attributes:
        architecture: the model.
        precision: bytes per parameter of weights, gradients and optimizer states.
        global_batch_size: samples per optimizer step over all workers.
        sequence_length: longest sample in tokens; of the encoder, for encoder-decoder models.
        target_length: longest decoder sequence of encoder-decoder models in tokens, else 0.
        pretrained: weights are loaded (see `count_parameters`).
        lora_rank: of the adapters that are trained beside frozen weights; None: all parameters are trained.
        lora_dropout: what these are given passes through dropout.
        quantised: the frozen weights are kept in 4 bits.
        offload: what is kept in host memory.
        fused_attention: attention scores are never written to memory.
        compiled: layers are compiled.
        chunked_loss: and the loss, which is computed from a chunk of logits at a time.
        runtime_bytes: what a worker's process holds beside its tensors.
        usable_fraction: part of the device's memory that is planned for.
        on_cpu: the workers' device is the host itself.
    """

    architecture: Architecture
    precision: Precision
    global_batch_size: int
    sequence_length: int
    target_length: int = 0
    pretrained: bool = True
    lora_rank: int | None = None
    lora_dropout: bool = False
    quantised: bool = False
    offload: Offload = "none"
    fused_attention: bool = True
    compiled: bool = False
    chunked_loss: bool = False
    runtime_bytes: int = GPU_RUNTIME_BYTES
    usable_fraction: float = GPU_USABLE_FRACTION
    on_cpu: bool = False

    def budget_bytes(self, device_bytes: int) -> int:
        """What may be planned for on a device of `device_bytes`."""
        return int(device_bytes * self.usable_fraction)

    @property
    def trained(self) -> TrainedParameters:
        """How many parameters are trained."""
        return trained_parameters(
            self.architecture, pretrained=self.pretrained, lora_rank=self.lora_rank, quantised=self.quantised
        )

    def memory(self, world_size: int, layout: Layout) -> MemoryEstimate:
        """Memory of one of `world_size` workers under `layout`."""
        workload = Workload(
            micro_batch_size=layout.micro_batch_size,
            sequence_length=self.sequence_length,
            target_length=self.target_length,
            bytes_per_element=self.precision.weight_bytes,
            gradient_checkpointing=layout.gradient_checkpointing,
            fused_attention=self.fused_attention,
            compiled=self.compiled,
            chunked_loss=self.chunked_loss,
            lora_rank=self.lora_rank,
            lora_dropout=self.lora_dropout,
        )
        return estimate_memory(
            self.architecture,
            workload,
            self.precision,
            layout.zero_stage,
            world_size,
            offload=self.offload,
            gathered_layers=layout.gathered_layers,
            whole_gradients=layout.whole_gradients,
            trained=self.trained,
            runtime_bytes=self.runtime_bytes,
            on_cpu=self.on_cpu,
        )


@dataclass(frozen=True)
class Layout:
    """How the work is laid out on the workers.

    At stage 3, `gathered_layers`: the weights of so many layers are gathered once a step, and stay; those of the others
    before each use. `whole_gradients`: each worker adds up whole gradients over the passes of a step, and they are
    reduced once; else after every pass, and a worker keeps its part.
    """

    zero_stage: ZeroStage
    micro_batch_size: int
    gradient_checkpointing: bool
    gathered_layers: int = 0
    whole_gradients: bool = False


@dataclass(frozen=True)
class Request:
    """What the user asked for in `execution`; `auto` is left to the plan."""

    zero_stage: Literal["auto"] | ZeroStage = "auto"
    micro_batch_size: Literal["auto"] | int = "auto"
    gradient_checkpointing: Literal["auto"] | bool = "auto"

    @property
    def complete(self) -> bool:
        """Whether nothing is left to choose."""
        return "auto" not in (self.zero_stage, self.micro_batch_size, self.gradient_checkpointing)

    def layout(self) -> Layout:
        """The layout that a complete request spells out."""
        assert self.zero_stage != "auto", "asked for completeness first"
        assert self.micro_batch_size != "auto", "asked for completeness first"
        return Layout(self.zero_stage, self.micro_batch_size, self.gradient_checkpointing is True)


@dataclass(frozen=True)
class Choice:
    """A layout, the memory it takes on each worker, and the reason for people.

    `fits` can be false only where the user asked for all of it: estimates do not overrule an explicit layout.
    """

    layout: Layout
    memory: MemoryEstimate
    reason: str
    fits: bool = True


def choose_layout(setup: Setup, world_size: int, device_bytes: int, request: Request = Request()) -> Choice:
    """The lowest ZeRO stage that fits `device_bytes` on each of `world_size` workers, with a micro-batch for it.

    Raises:
        JobError: nothing fits, with what is missing and what would help; or `request` contradicts the offload.
    """
    budget = setup.budget_bytes(device_bytes)
    stages = _stages(setup, request)
    if request.complete:
        return _as_asked(setup, world_size, device_bytes, request)
    for stage in stages:
        layout = _layout_at(setup, world_size, budget, stage, request)
        if layout is not None:
            layout = _with_spare_memory(setup, world_size, budget, layout)
            memory = setup.memory(world_size, layout)
            return Choice(layout, memory, _reason(layout, memory, device_bytes, request))
    raise JobError(_refusal(setup, world_size, device_bytes, request))


def balanced_micro_batch_size(
    global_batch_size: int, world_size: int, largest: int, sample_tokens: int, zero_stage: ZeroStage
) -> int:
    """The micro-batch size up to `largest` at which a step is shortest, and of equal ones the smallest.

    Micro-batch g of a step goes to worker g mod `world_size`, and a step takes as long as its busiest worker: for its
    samples, of `sample_tokens` each, or for its passes where they are too small to keep the device busy; and for what a
    pass takes besides (`PASS_TOKENS`).
    """

    def step_tokens(size: int) -> int:
        passes = passes_per_step(global_batch_size, world_size, size)
        samples = _busiest_worker_samples(global_batch_size, world_size, size)
        return max(samples * sample_tokens, passes * BUSY_TOKENS) + passes * PASS_TOKENS[zero_stage]

    return min(range(1, min(largest, math.ceil(global_batch_size / world_size)) + 1), key=step_tokens)


def passes_per_step(global_batch_size: int, world_size: int, micro_batch_size: int) -> int:
    """Micro-batches of a step that the busiest worker runs."""
    return math.ceil(math.ceil(global_batch_size / micro_batch_size) / world_size)


def _busiest_worker_samples(global_batch_size: int, world_size: int, micro_batch_size: int) -> int:
    micro_batches = math.ceil(global_batch_size / micro_batch_size)
    passes = passes_per_step(global_batch_size, world_size, micro_batch_size)
    missing = micro_batches * micro_batch_size - global_batch_size
    last_is_alone = (micro_batches - 1) % world_size == 0
    return passes * micro_batch_size - (missing if last_is_alone else 0)


def _stages(setup: Setup, request: Request) -> tuple[ZeroStage, ...]:
    """ZeRO stages to try, lowest first.

    Stage 0 is for float32 without offload only: DeepSpeed's mixed precision without ZeRO would not restore exactly, so
    the trainer runs it as stage 1. Stage 3 cannot shard quantised weights, nor compiled layers with frozen ones.
    """
    lowest = max(LOWEST_STAGE[setup.offload], 1 if setup.precision.is_mixed else 0)
    every: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    if request.zero_stage == "auto":
        return every[lowest : _highest_stage(setup) + 1]
    if setup.offload != "none" and request.zero_stage < lowest:
        raise JobError(
            f"execution.zeroStage {request.zero_stage} cannot go with execution.offload {setup.offload}, which needs "
            f"{'stage 3' if lowest == 3 else 'stage 1 or more'}; set zeroStage to auto or {lowest}, or offload to none."
        )
    return (request.zero_stage,)


def _highest_stage(setup: Setup) -> int:
    return 2 if setup.quantised or (setup.compiled and setup.lora_rank is not None) else 3


def _layout_at(setup: Setup, world_size: int, budget: int, stage: ZeroStage, request: Request) -> Layout | None:
    """The layout of one stage, or None where it does not fit."""
    share, tokens = math.ceil(setup.global_batch_size / world_size), setup.sequence_length + setup.target_length
    enough = min(share, math.ceil(BUSY_TOKENS / tokens))
    checkpointing = (False, True) if request.gradient_checkpointing == "auto" else (request.gradient_checkpointing,)
    best: Layout | None = None
    for recompute in checkpointing:
        if request.micro_batch_size == "auto":
            size = _largest_micro_batch(setup, world_size, budget, stage, recompute, share)
        else:
            size = request.micro_batch_size
        layout = Layout(stage, size, recompute)
        if size < 1 or setup.memory(world_size, layout).total_bytes > budget:
            continue
        if best is None or size > best.micro_batch_size:
            best = layout
        if size >= enough or request.micro_batch_size != "auto":
            break
    if best is None or request.micro_batch_size != "auto":
        return best
    size = balanced_micro_batch_size(setup.global_batch_size, world_size, best.micro_batch_size, tokens, stage)
    return Layout(stage, size, best.gradient_checkpointing)


def _with_spare_memory(setup: Setup, world_size: int, budget: int, layout: Layout) -> Layout:
    """At stage 3 the layout with as many layers gathered as fit, and then whole gradients if they spare a reduction.

    A layer would be gathered twice a pass and its gradients reduced once, for as much memory and communication each.
    """
    if layout.zero_stage < 3 or world_size == 1 or setup.offload != "none":
        return layout

    def fits(tried: Layout) -> bool:
        return setup.memory(world_size, tried).total_bytes <= budget

    layers = setup.trained.layers
    layouts = (replace(layout, gathered_layers=number) for number in range(layers, 0, -1))
    layout = next(filter(fits, layouts), layout)
    whole = replace(layout, whole_gradients=True)
    passes = passes_per_step(setup.global_batch_size, world_size, layout.micro_batch_size)
    return whole if layout.gathered_layers == layers and passes > 1 and fits(whole) else layout


def _largest_micro_batch(
    setup: Setup, world_size: int, budget: int, stage: ZeroStage, recompute: bool, share: int
) -> int:
    """The largest micro-batch size that fits, by bisection; 0 where not even one sample does."""
    fitting, too_large = 0, share + 1
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if setup.memory(world_size, Layout(stage, middle, recompute)).total_bytes <= budget:
            fitting = middle
        else:
            too_large = middle
    return fitting


def _as_asked(setup: Setup, world_size: int, device_bytes: int, request: Request) -> Choice:
    layout = _with_spare_memory(setup, world_size, setup.budget_bytes(device_bytes), request.layout())
    memory = setup.memory(world_size, layout)
    fits = memory.total_bytes <= device_bytes
    reason = "as set in execution"
    if not fits:
        reason += f"; it may run out of memory: {_gb(memory.total_bytes)} estimated, the device has {_gb(device_bytes)}"
    return Choice(layout, memory, reason, fits)


def _reason(layout: Layout, memory: MemoryEstimate, device_bytes: int, request: Request) -> str:
    stage = "as set" if request.zero_stage != "auto" else "the lowest that fits"
    checkpointing = "with" if layout.gradient_checkpointing else "without"
    spare = f", {layout.gathered_layers} layers gathered once a step" if layout.gathered_layers else ""
    spare += ", gradients reduced once a step" if layout.whole_gradients else ""
    return (
        f"ZeRO stage {layout.zero_stage} ({stage}), micro-batch {layout.micro_batch_size} {checkpointing} gradient "
        f"checkpointing{spare}: {_gb(memory.total_bytes)} of {_gb(device_bytes)} per worker"
    )


def _refusal(setup: Setup, world_size: int, device_bytes: int, request: Request) -> str:
    """What is missing at the most frugal layout that was allowed, and what would help."""
    size = 1 if request.micro_batch_size == "auto" else request.micro_batch_size
    layout = Layout(_stages(setup, request)[-1], size, request.gradient_checkpointing is not False)
    memory = setup.memory(world_size, layout)
    states, budget = memory.states, setup.budget_bytes(device_bytes)
    return (
        f"This {setup.architecture.model_type} model does not fit on {_workers(world_size)} with "
        f"{_gb(device_bytes)} each: it needs {_gb(memory.total_bytes)} per worker even at ZeRO stage "
        f"{layout.zero_stage}, micro-batch {size} {'with' if layout.gradient_checkpointing else 'without'} gradient "
        f"checkpointing (weights {_gb(states.weights_bytes)}, gradients {_gb(states.gradients_bytes)}, optimizer "
        f"{_gb(states.optimizer_bytes)}, activations {_gb(memory.activations.total_bytes)}, other "
        f"{_gb(memory.other_bytes)}), and {_gb(budget)} can be planned for. "
        f"What would help: {', '.join(_remedies(setup, world_size, budget, layout))}."
    )


def _remedies(setup: Setup, world_size: int, budget: int, layout: Layout) -> list[str]:
    remedies = []
    enough = _fitting_world_size(setup, world_size, budget, layout)
    if enough is not None:
        remedies.append(f"{enough} workers of this size")
    remedies += _fitting_offload(setup, world_size, budget, layout)
    if layout.zero_stage < _highest_stage(setup):
        remedies.append("execution.zeroStage auto")
    if not setup.quantised and _highest_stage(setup) < 3:
        remedies.append("execution.compile auto (so that stage 3 can shard the frozen weights)")
    if not layout.gradient_checkpointing:
        remedies.append("execution.gradientCheckpointing auto")
    if not setup.precision.is_mixed:
        remedies.append("model.dtype bfloat16 (half the weights and activations)")
    if layout.micro_batch_size > 1:
        remedies.append("execution.microBatchSize auto")
    memory = setup.memory(world_size, layout)
    if memory.activations.total_bytes > memory.total_bytes / 4:
        remedies.append("a shorter dataset.maxLength")
    return [*remedies, "a device with more memory, or a smaller model"]


def _fitting_world_size(setup: Setup, world_size: int, budget: int, layout: Layout) -> int | None:
    """The next number of workers, by doubling, at which `layout` fits."""
    workers = 2 * world_size
    while workers <= MOST_WORKERS_TRIED:
        if setup.memory(workers, layout).total_bytes <= budget:
            return workers
        workers *= 2
    return None


def _fitting_offload(setup: Setup, world_size: int, budget: int, layout: Layout) -> list[str]:
    """The least offload at which `layout` fits, with the host memory that it takes; nothing for CPU workers."""
    for offload in () if setup.on_cpu else _MORE_OFFLOAD[setup.offload]:
        if layout.zero_stage >= LOWEST_STAGE[offload]:
            memory = replace(setup, offload=offload).memory(world_size, layout)
            if memory.total_bytes <= budget:
                return [f"execution.offload {offload} ({_gb(memory.host_bytes)} of host memory per worker)"]
    return []


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / GB:.1f} GB"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
