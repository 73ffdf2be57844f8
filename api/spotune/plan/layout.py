"""Chooses ZeRO stage, micro-batch size and gradient checkpointing for a device and a number of workers.

The lowest ZeRO stage that fits is chosen, because every stage communicates at least as much as the one below it (ZeRO
paper, section 7). Within a stage, gradient checkpointing is used only if the micro-batch would otherwise be too small
to keep a device busy, because it computes layers again: no more of them than memory requires. If nothing fits, what
these layers save is offloaded to host memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from spotune.errors import JobError
from spotune.job.execution import LOWEST_STAGE
from spotune.plan.memory import GB, MemoryEstimate, Offload, ZeroStage
from spotune.plan.training_setup import Layout, TrainingSetup

SATURATING_TOKENS = 2048
"""Tokens per forward pass above which a device is assumed to be fully utilised."""
PASS_OVERHEAD_TOKENS: Final[Mapping[ZeroStage, int]] = {0: 256, 1: 256, 2: 256, 3: 1024}
"""Approximate overhead of a forward and backward pass, in tokens that could be trained in the same time.

The overhead is gradient accumulation and, at stage 3, gathering weights and reducing gradients (a few hundred tokens on
two H200s, docs/benchmarks.md; more over a network).
"""
MAX_WORKERS_TRIED = 1024
_FURTHER_OFFLOAD: Final[Mapping[Offload, tuple[Offload, ...]]] = {
    "none": ("optimizer", "parameters"),
    "optimizer": ("parameters",),
    "parameters": (),
}
"""Offload settings that move more to host memory than the key does, least first."""


class ModelTooLargeError(JobError):
    """The model does not fit on so many workers of this size, at any layout that the job allows."""


@dataclass(frozen=True)
class LayoutRequest:
    """The layout fields of a job's `execution`, and how many commits stay in memory; the plan resolves `auto`."""

    zero_stage: Literal["auto"] | ZeroStage = "auto"
    micro_batch_size: Literal["auto"] | int = "auto"
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    memory_copies: Literal["auto", 0, 1, 2] = 1
    peer_copy: Literal["auto"] | bool = False
    offload_activations: Literal["auto"] | bool = False

    @property
    def complete(self) -> bool:
        """Whether no field of the layout is `auto`."""
        return "auto" not in (self.zero_stage, self.micro_batch_size, self.gradient_checkpointing)

    def layout(self) -> Layout:
        """The layout of a complete request."""
        assert self.zero_stage != "auto", "the request is complete"
        assert self.micro_batch_size != "auto", "the request is complete"
        offload = self.offload_activations is True
        recompute = self.gradient_checkpointing is True or offload
        return Layout(self.zero_stage, self.micro_batch_size, recompute, offload_activations=offload)


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, its memory per worker, and the reason for choosing it, for display.

    `fits` is false only for a layout that the user has set completely: an estimate does not overrule it.
    `memory_copies` is the number of commits that each worker keeps in memory. With `peer_copy`, it has memory for one
    of another node as well.
    """

    layout: Layout
    memory: MemoryEstimate
    reason: str
    fits: bool = True
    memory_copies: int = 1
    peer_copy: bool = False


def choose_layout(
    setup: TrainingSetup, world_size: int, device_bytes: int, request: LayoutRequest = LayoutRequest()
) -> LayoutChoice:
    """Choose the lowest ZeRO stage that fits `device_bytes` on each of `world_size` workers, and a micro-batch size.

    With `memory_copies` auto, each worker keeps a second commit in memory if it fits beside that layout. With
    `peer_copy` auto, it then keeps one of another node as well, if that fits, too.

    Raises:
        ModelTooLargeError: No layout fits; the message says what is missing and what would help.
        JobError: `request` contradicts the offload.
    """
    least = replace(
        request,
        memory_copies=1 if request.memory_copies == "auto" else request.memory_copies,
        peer_copy=request.peer_copy is True,
    )
    choice = _choose_with_copies(setup, world_size, device_bytes, least)
    most = 2 if request.memory_copies == "auto" else request.memory_copies
    further = [replace(choice, memory_copies=most)] if request.memory_copies == "auto" else []
    if request.peer_copy == "auto" and most:
        further.append(replace(choice, memory_copies=most, peer_copy=True))
    for more in further:
        copies = commit_copies(more.memory_copies, peer_copy=more.peer_copy)
        memory = memory_with_copies(setup, world_size, device_bytes, choice.layout, copies)
        if memory is None:
            break
        reason = choice.reason if request.complete else _reason(choice.layout, memory, device_bytes, request)
        choice = replace(more, memory=memory, reason=reason)
    return choice


def commit_copies(memory_copies: int, *, peer_copy: bool) -> int:
    """Number of copies of a commit for which a worker needs memory: at least the one that its file is written from."""
    return max(1, memory_copies) + peer_copy


def memory_with_copies(
    setup: TrainingSetup, world_size: int, device_bytes: int, layout: Layout, copies: int
) -> MemoryEstimate | None:
    """The memory of a worker with so many copies of a commit; None if that does not fit.

    On GPU workers, all are in host memory. If its size is not known, they fit here, and the node itself decides.
    """
    memory = replace(setup, commit_copies=copies).memory(world_size, layout)
    fits = memory.total_bytes <= setup.budget_bytes(device_bytes) if setup.on_cpu else _fits_on_host(setup, memory)
    return memory if fits else None


def _fits_on_host(setup: TrainingSetup, memory: MemoryEstimate) -> bool:
    return setup.on_cpu or setup.host_memory_bytes is None or memory.host_peak_bytes <= setup.host_memory_bytes


def _choose_with_copies(
    setup: TrainingSetup, world_size: int, device_bytes: int, request: LayoutRequest
) -> LayoutChoice:
    """The choice for a number of commits in memory that is not `auto`."""
    assert request.memory_copies != "auto", "resolved before"
    assert request.peer_copy != "auto", "resolved before"
    setup = replace(setup, commit_copies=commit_copies(request.memory_copies, peer_copy=request.peer_copy))
    budget = setup.budget_bytes(device_bytes)
    stages = _candidate_stages(setup, request)
    if request.complete:
        choice = _explicit_choice(setup, world_size, device_bytes, request)
        return replace(choice, memory_copies=request.memory_copies, peer_copy=request.peer_copy)
    offloads = (False, True) if request.offload_activations == "auto" else (request.offload_activations,)
    for offload, stage in itertools.product(offloads, stages):
        layout = _layout_at(setup, world_size, budget, stage, request, offload=offload)
        if layout is not None:
            layout = _use_spare_memory(setup, world_size, budget, layout)
            memory = setup.memory(world_size, layout)
            reason = _reason(layout, memory, device_bytes, request)
            return LayoutChoice(
                layout, memory, reason, memory_copies=request.memory_copies, peer_copy=request.peer_copy
            )
    raise ModelTooLargeError(_does_not_fit(setup, world_size, device_bytes, request))


def balanced_micro_batch_size(
    global_batch_size: int, world_size: int, largest: int, sample_tokens: int, zero_stage: ZeroStage
) -> int:
    """The micro-batch size up to `largest` with the shortest step; the smallest of several equal ones.

    Micro-batch g of a step goes to worker g mod `world_size`, and a step takes as long as the busiest worker. Its time
    in tokens is the maximum of its samples times `sample_tokens` and its passes times `SATURATING_TOKENS`, plus
    `PASS_OVERHEAD_TOKENS` per pass.
    """

    def step_tokens(size: int) -> int:
        passes = passes_per_step(global_batch_size, world_size, size)
        samples = _busiest_worker_samples(global_batch_size, world_size, size)
        return max(samples * sample_tokens, passes * SATURATING_TOKENS) + passes * PASS_OVERHEAD_TOKENS[zero_stage]

    return min(range(1, min(largest, math.ceil(global_batch_size / world_size)) + 1), key=step_tokens)


def passes_per_step(global_batch_size: int, world_size: int, micro_batch_size: int) -> int:
    """Number of micro-batches per step on the busiest worker."""
    return math.ceil(math.ceil(global_batch_size / micro_batch_size) / world_size)


def _busiest_worker_samples(global_batch_size: int, world_size: int, micro_batch_size: int) -> int:
    micro_batches = math.ceil(global_batch_size / micro_batch_size)
    passes = passes_per_step(global_batch_size, world_size, micro_batch_size)
    missing = micro_batches * micro_batch_size - global_batch_size
    last_is_alone = (micro_batches - 1) % world_size == 0
    return passes * micro_batch_size - (missing if last_is_alone else 0)


def _candidate_stages(setup: TrainingSetup, request: LayoutRequest) -> tuple[ZeroStage, ...]:
    """The ZeRO stages to try, lowest first.

    Stage 0 is only used for float32 without offload: DeepSpeed's mixed precision without ZeRO does not restore exactly,
    so the trainer runs it as stage 1. Stage 3 cannot shard quantized weights, compiled layers with frozen weights, or
    matrices that the optimizer updates as a whole, and does not sum gradients in fixed point.
    """
    lowest = max(LOWEST_STAGE[setup.offload], 1 if setup.precision.is_mixed else 0)
    every: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    if request.zero_stage == "auto":
        return every[lowest : _highest_stage(setup) + 1]
    if setup.offload != "none" and request.zero_stage < lowest:
        raise JobError(
            f"execution.zeroStage {request.zero_stage} does not support execution.offload {setup.offload}, which needs "
            f"{'stage 3' if lowest == 3 else 'stage 1 or more'}; set zeroStage to auto or {lowest}, or offload to none."
        )
    return (request.zero_stage,)


def _highest_stage(setup: TrainingSetup) -> int:
    compiled_adapter = setup.compiled and setup.lora_rank is not None
    precision = setup.precision
    return 2 if setup.quantised or compiled_adapter or precision.whole_matrices or precision.fixed_point else 3


def _layout_at(
    setup: TrainingSetup, world_size: int, budget: int, stage: ZeroStage, request: LayoutRequest, *, offload: bool
) -> Layout | None:
    """The layout for one ZeRO stage, or None if none fits."""
    share, tokens = math.ceil(setup.global_batch_size / world_size), setup.sequence_length + setup.target_length
    sufficient = min(share, math.ceil(SATURATING_TOKENS / tokens))
    asked: Literal["auto"] | bool = True if offload else request.gradient_checkpointing
    best: Layout | None = None
    for recompute in (False, True) if asked == "auto" else (asked,):
        layout, size = Layout(stage, 1, recompute, offload_activations=offload), request.micro_batch_size
        if size == "auto":
            size = _largest_micro_batch(setup, world_size, budget, layout, share)
        layout = replace(layout, micro_batch_size=size)
        if size < 1 or not _fits(setup, world_size, budget, layout):
            continue
        if best is None or size > best.micro_batch_size:
            best = layout
        if size >= sufficient or request.micro_batch_size != "auto":
            break
    if best is None:
        return None
    # At stage 3 spare memory gathers layers instead (`_use_spare_memory`).
    may_keep = stage < 3 and setup.architecture.encoder is None and request.gradient_checkpointing == "auto"
    keeps_some = best.gradient_checkpointing and may_keep
    if request.micro_batch_size == "auto":
        # Memory for a micro-batch beyond what keeps the device busy is better spent on layers.
        largest = min(best.micro_batch_size, sufficient) if keeps_some else best.micro_batch_size
        size = balanced_micro_batch_size(setup.global_batch_size, world_size, largest, tokens, stage)
        best = replace(best, micro_batch_size=size)
    return _keep_layers(setup, world_size, budget, best) if keeps_some else best


def _keep_layers(setup: TrainingSetup, world_size: int, budget: int, layout: Layout) -> Layout:
    """Recompute only as many layers as memory requires."""
    layouts = (replace(layout, kept_layers=kept) for kept in range(setup.architecture.decoder.layers - 1, 0, -1))
    return next((tried for tried in layouts if _fits(setup, world_size, budget, tried)), layout)


def _fits(setup: TrainingSetup, world_size: int, budget: int, layout: Layout) -> bool:
    memory = setup.memory(world_size, layout)
    return memory.total_bytes <= budget and (not layout.offload_activations or _fits_on_host(setup, memory))


def _use_spare_memory(setup: TrainingSetup, world_size: int, budget: int, layout: Layout) -> Layout:
    """Spend spare memory at stage 3: keep as many layers gathered as fit, then use whole gradients if they fit.

    Gathered layers come first: a sharded layer is gathered twice per pass and its gradients are reduced once, and both
    take the same memory and communication. Whole gradients only help if a step has several passes.
    """
    if layout.zero_stage < 3 or world_size == 1 or setup.offload != "none":
        return layout
    fits, layers = partial(_fits, setup, world_size, budget), setup.trained.layers
    layouts = (replace(layout, gathered_layers=number) for number in range(layers, 0, -1))
    layout = next(filter(fits, layouts), layout)
    whole = replace(layout, whole_gradients=True)
    passes = passes_per_step(setup.global_batch_size, world_size, layout.micro_batch_size)
    return whole if layout.gathered_layers == layers and passes > 1 and fits(whole) else layout


def _largest_micro_batch(setup: TrainingSetup, world_size: int, budget: int, layout: Layout, share: int) -> int:
    """The largest micro-batch size that fits, by bisection; 0 if not even one sample fits."""
    fitting, too_large = 0, share + 1
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if _fits(setup, world_size, budget, replace(layout, micro_batch_size=middle)):
            fitting = middle
        else:
            too_large = middle
    return fitting


def _explicit_choice(setup: TrainingSetup, world_size: int, device_bytes: int, request: LayoutRequest) -> LayoutChoice:
    layout = _use_spare_memory(setup, world_size, setup.budget_bytes(device_bytes), request.layout())
    memory = setup.memory(world_size, layout)
    fits = memory.total_bytes <= device_bytes
    reason = "as set in execution"
    if not fits:
        reason += f"; it may run out of memory: {_gb(memory.total_bytes)} estimated, the device has {_gb(device_bytes)}"
    return LayoutChoice(layout, memory, reason, fits)


def _reason(layout: Layout, memory: MemoryEstimate, device_bytes: int, request: LayoutRequest) -> str:
    stage = "as set" if request.zero_stage != "auto" else "the lowest that fits"
    checkpointing = "with" if layout.gradient_checkpointing else "without"
    kept = f" of all but {layout.kept_layers} layers" if layout.kept_layers else ""
    kept += ", offloaded to the host" if layout.offload_activations else ""
    spare = f", {layout.gathered_layers} layers gathered once a step" if layout.gathered_layers else ""
    spare += ", gradients reduced once a step" if layout.whole_gradients else ""
    return (
        f"ZeRO stage {layout.zero_stage} ({stage}), micro-batch {layout.micro_batch_size} {checkpointing} gradient "
        f"checkpointing{kept}{spare}: {_gb(memory.total_bytes)} of {_gb(device_bytes)} per worker"
    )


def _does_not_fit(setup: TrainingSetup, world_size: int, device_bytes: int, request: LayoutRequest) -> str:
    """The error message if nothing fits: the memory of the smallest allowed layout, and what would help."""
    size = 1 if request.micro_batch_size == "auto" else request.micro_batch_size
    recompute = request.gradient_checkpointing is not False
    offload = recompute and request.offload_activations is not False
    layout = Layout(_candidate_stages(setup, request)[-1], size, recompute, offload_activations=offload)
    memory = setup.memory(world_size, layout)
    states, budget = memory.states, setup.budget_bytes(device_bytes)
    return (
        f"This {setup.architecture.model_type} model does not fit on {_workers(world_size)} with "
        f"{_gb(device_bytes)} each: it needs {_gb(memory.total_bytes)} per worker even at ZeRO stage "
        f"{layout.zero_stage}, micro-batch {size} {'with' if layout.gradient_checkpointing else 'without'} gradient "
        f"checkpointing (weights {_gb(states.weights_bytes)}, gradients {_gb(states.gradients_bytes)}, optimizer "
        f"{_gb(states.optimizer_bytes)}, activations {_gb(memory.activations.total_bytes)}, other "
        f"{_gb(memory.other_bytes)}), and {_gb(budget)} of the device can be used. "
        f"What would help: {', '.join(_remedies(setup, world_size, budget, layout, request))}."
    )


def _remedies(setup: TrainingSetup, world_size: int, budget: int, layout: Layout, request: LayoutRequest) -> list[str]:
    remedies = []
    sufficient = _fitting_world_size(setup, world_size, budget, layout)
    if sufficient is not None:
        remedies.append(f"{sufficient} workers of this size")
    remedies += _fitting_offload(setup, world_size, budget, layout)
    remedies += _stage_remedies(setup, layout)
    if not layout.gradient_checkpointing:
        remedies.append("execution.gradientCheckpointing auto")
    if not setup.precision.is_mixed:
        remedies.append("model.dtype bfloat16 (half the weights and activations)")
    if layout.micro_batch_size > 1:
        is_fixed = setup.precision.fixed_point
        remedies.append("a smaller execution.microBatchSize" if is_fixed else "execution.microBatchSize auto")
    if setup.on_cpu and request.memory_copies == 2:
        remedies.append("checkpoint.memoryCopies auto")
    if setup.on_cpu and request.peer_copy is True:
        remedies.append("checkpoint.peerCopy auto")
    memory = setup.memory(world_size, layout)
    if layout.offload_activations and not _fits_on_host(setup, memory):
        remedies.append(f"workers.resources with {_gb(memory.host_peak_bytes)} of host memory for each GPU")
    if memory.activations.total_bytes > memory.total_bytes / 4:
        remedies.append("a shorter dataset.maxLength")
    return [*remedies, "a device with more memory, or a smaller model"]


def _stage_remedies(setup: TrainingSetup, layout: Layout) -> list[str]:
    """What would let the states be divided further."""
    highest = _highest_stage(setup)
    remedies = ["execution.zeroStage auto"] if layout.zero_stage < highest else []
    if setup.precision.whole_matrices:
        remedies.append("another training.optimizer, which ZeRO stage 3 and execution.offload support")
    elif setup.precision.fixed_point:
        remedies.append("execution.reproducible none, which ZeRO stage 3 and execution.offload support")
    elif not setup.quantised and highest < 3:
        field = "precision" if setup.fp8 else "compile"
        remedies.append(f"execution.{field} auto (so that stage 3 can shard the frozen weights)")
    return remedies


def _fitting_world_size(setup: TrainingSetup, world_size: int, budget: int, layout: Layout) -> int | None:
    """The first number of workers, doubling from `world_size`, at which `layout` fits; None if there is none."""
    workers = 2 * world_size
    while workers <= MAX_WORKERS_TRIED:
        if setup.memory(workers, layout).total_bytes <= budget:
            return workers
        workers *= 2
    return None


def _fitting_offload(setup: TrainingSetup, world_size: int, budget: int, layout: Layout) -> list[str]:
    """The smallest offload with which `layout` fits, and its host memory; empty for CPU workers or if none fits."""
    precision = setup.precision
    without = setup.on_cpu or precision.whole_matrices or precision.fixed_point
    for offload in () if without else _FURTHER_OFFLOAD[setup.offload]:
        if layout.zero_stage >= LOWEST_STAGE[offload]:
            memory = replace(setup, offload=offload).memory(world_size, layout)
            if memory.total_bytes <= budget:
                return [f"execution.offload {offload} ({_gb(memory.host_bytes)} of host memory per worker)"]
    return []


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / GB:.1f} GB"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
