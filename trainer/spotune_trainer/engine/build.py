"""Build a DeepSpeed engine around a transformers model, and compute the learning rate of a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel, get_scheduler

from spotune.errors import JobError
from spotune.job import TrainingSpec
from spotune.job.execution import FP8_PRECISIONS, Precision
from spotune.plan.memory import PREFETCH_ELEMENTS, Offload, can_stream
from spotune_trainer.engine.activations.offload import ActivationOffload
from spotune_trainer.engine.activations.recomputation import recompute_layers
from spotune_trainer.engine.compile.gradient_accumulation_fusion import register_weight
from spotune_trainer.engine.compile.layers import compile_layers, repeated_layers
from spotune_trainer.engine.deepspeed_operators import compile_no_operators
from spotune_trainer.engine.ema import create_ema
from spotune_trainer.engine.fixed_point_gradients import has_fixed_point_gradients, install_fixed_point_gradients
from spotune_trainer.engine.host_states.masters import masters_without_memory, move_masters_to_host
from spotune_trainer.engine.optimizers.build import build_optimizer
from spotune_trainer.engine.sync_free_step import install_sync_free_step, skip_step_unless_finite
from spotune_trainer.engine.zero3_communication import (
    install_reduction_once_per_step,
    install_zero_copy_collectives,
    keep_gathered,
)
from spotune_trainer.engine.zero_state import check_version, create_states
from spotune_trainer.models.fused_linear_cross_entropy import fuse_linear_cross_entropy

_LARGEST_BUCKET_ELEMENTS = 500_000_000

LearningRate = Callable[[int], float]
"""Maps the 0-based optimizer step to its learning rate."""


@dataclass(frozen=True)
class EngineConfig:
    """How a model is trained on a worker group; values come from the plan.

    Attributes:
        zero_stage: 0 to 3; see `effective_stage` for what runs at stage 0.
        micro_batch_size: samples in one forward pass of one rank.
        accumulation: gradient accumulation steps: micro-batches of one rank in one optimizer step.
        dtype: of parameters and activations; masters and moments are fp32.
        gradient_checkpointing: recompute layers in the backward pass.
        offload: what is kept in host memory. See `streams_states` for what updates an offloaded optimizer state.
        compile: compile layers and loss with torch.compile.
        gathered_layers: at stage 3, number of layers whose weights stay gathered until the optimizer steps.
        whole_gradients: at stage 3, accumulate whole gradients on every rank and reduce them once a step.
        fixed_point_terms: if not 0, gradients are summed in fixed point, and this is the number of micro-batches of a
            step over all ranks. The gradient is then the sum over the ranks, not DeepSpeed's mean.
        precision: of the matrix products in the layers; auto: `dtype`.
        kept_layers: with gradient checkpointing, number of layers at the end of the model that are not recomputed.
        saves_attention: likewise, whether recomputed layers save the output of attention. Compiled ones always do.
        offload_activations: with gradient checkpointing, whether what recomputed layers save is moved to host memory.
    """

    zero_stage: int
    micro_batch_size: int
    accumulation: int
    dtype: torch.dtype
    gradient_checkpointing: bool
    offload: Offload = "none"
    compile: bool = False
    gathered_layers: int = 0
    whole_gradients: bool = False
    fixed_point_terms: int = 0
    precision: Precision = "auto"
    kept_layers: int = 0
    saves_attention: bool = False
    offload_activations: bool = False


def effective_stage(zero_stage: int, dtype: torch.dtype) -> int:
    """The ZeRO stage that runs: stage 0 in low precision runs as stage 1.

    Without ZeRO, DeepSpeed's low-precision wrapper creates Adam's state by a step on zero gradients. That step counts,
    and decays the weights.
    """
    return 1 if zero_stage == 0 and dtype != torch.float32 else zero_stage


def build_engine(model: PreTrainedModel, training: TrainingSpec, config: EngineConfig) -> Any:
    """Wrap a model for training. The process group must be initialized.

    Args:
        model: its parameters in fp32 or `config.dtype`.
        training: optimizer and gradient clipping.
        config: stage, precision, offload and batch sizes.

    Returns:
        A `deepspeed.DeepSpeedEngine` whose `module` is the model.

    Raises:
        JobError: the device does not support `config.dtype` or `config.precision`, or the layers cannot be compiled at
            this stage, or have nothing to compute in FP8.
    """
    check_version()
    if config.dtype == torch.float16 and not get_accelerator().is_fp16_supported():
        raise JobError("model.dtype: float16 needs a GPU; this device does not support it: use bfloat16 or float32")
    compile_no_operators()
    deepspeed.init_distributed(dist_backend=_backend(), auto_mpi_discovery=False, verbose=False)
    recomputed = _recomputed_layers(model, config)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    vectors = max((parameter.numel() for parameter in model.parameters() if parameter.dim() < 2), default=0)
    if config.precision in FP8_PRECISIONS:
        _use_float8(model, config.precision)
    if config.compile:
        _compile(model, config, recomputed)
    if config.offload_activations:
        offload = ActivationOffload()
        for layer in recomputed:
            layer.forward = offload.wrap(layer, layer.forward)
    gathered = _gather_whole_layers(model) if config.zero_stage == 3 else 0
    engine = _initialize(model, training, config, _deepspeed_config(training, config, trained, gathered, vectors))
    create_states(engine)
    if training.ema_decay:
        create_ema(engine)
    if config.fixed_point_terms:
        install_fixed_point_gradients(engine, config.fixed_point_terms)
    else:
        install_sync_free_step(engine)
    if engine.zero_optimization_stage() == 3:
        _configure_stage_3(engine, config, gathered)
    else:
        for parameter in engine.module.parameters():
            register_weight(parameter)
    return engine


def _initialize(
    model: PreTrainedModel, training: TrainingSpec, config: EngineConfig, deepspeed_config: dict[str, Any]
) -> Any:
    streams = streams_states(training, config.dtype, config.zero_stage, config.offload)
    on_device = config.offload == "none" or streams
    optimizer = build_optimizer(model, training, compiled=config.compile and on_device)
    with masters_without_memory() if streams else nullcontext():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config, dist_init_required=False
        )
    if streams:
        move_masters_to_host(engine)
    return engine


def streams_states(training: TrainingSpec, dtype: torch.dtype, zero_stage: int, offload: Offload) -> bool:
    """Whether optimizer states are in host memory and the device updates them piece by piece, not the processor."""
    streamed = dtype == torch.bfloat16 and can_stream(training.optimizer, ema=training.ema_decay > 0)
    return offload == "optimizer" and effective_stage(zero_stage, dtype) < 3 and streamed


def _configure_stage_3(engine: Any, config: EngineConfig, gathered: int) -> None:
    install_zero_copy_collectives(engine)
    if gathered and config.offload != "parameters":
        released_layers = _layers_to_release(repeated_layers(engine.module), config.gathered_layers)
        released = {parameter for layer in released_layers for parameter in layer.parameters()}
        keep_gathered(parameter for parameter in engine.module.parameters() if parameter not in released)
    if config.whole_gradients:
        install_reduction_once_per_step(engine.optimizer)


def _layers_to_release(layers: Sequence[torch.nn.Module], kept: int) -> list[torch.nn.Module]:
    """The layers without `kept` evenly spaced ones.

    Between two layers that must be gathered one is then computed that need not be, which gives the all-gather time.
    """
    count = len(layers)
    return [layer for index, layer in enumerate(layers) if (index + 1) * kept // count == index * kept // count]


def _gather_whole_layers(model: PreTrainedModel) -> int:
    """Make stage 3 gather the weights of a layer at once.

    By default DeepSpeed gathers each linear module by itself. The host needs longer for that than the device for the
    matrix product.

    Returns:
        Number of parameters of the largest layer; 0 if DeepSpeed cannot do it, because some weights are frozen.
    """
    layers = repeated_layers(model)
    if not layers or _has_frozen_weights(model):
        return 0
    deepspeed.utils.set_z3_leaf_modules(model, list({type(layer) for layer in layers}))
    return max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)


def _has_frozen_weights(model: PreTrainedModel) -> bool:
    return not all(parameter.requires_grad for parameter in model.parameters())


def _use_float8(model: PreTrainedModel, precision: Precision) -> None:
    from spotune_trainer.engine.float8 import check_device, convert_to_float8  # torchao takes seconds to import

    check_device(precision)
    convert_to_float8(repeated_layers(model), precision)


def _recomputed_layers(model: PreTrainedModel, config: EngineConfig) -> list[torch.nn.Module]:
    """The layers that are computed again; if layers are not compiled, it lets transformers do so."""
    if not config.gradient_checkpointing:
        return []
    model.config.use_cache = False
    layers = repeated_layers(model)
    first_kept = max(0, len(layers) - config.kept_layers)
    if not config.compile:
        recompute_layers(model, layers[first_kept:], saves_attention=config.saves_attention)
    return layers[:first_kept]


def _compile(model: PreTrainedModel, config: EngineConfig, recomputed: Sequence[torch.nn.Module]) -> None:
    if config.zero_stage == 3 and _has_frozen_weights(model):
        raise JobError(
            "execution.compile: layers with frozen weights, as with an adapter, cannot be compiled at ZeRO stage 3: "
            "set execution.zeroStage to 2 or less, or execution.compile to false"
        )
    compile_layers(model, recomputed)
    if config.dtype != torch.float16:  # the fused loss has unscaled gradients, which float16 would round to zero
        fuse_linear_cross_entropy(model, is_compiled=True)


def learning_rate(training: TrainingSpec, total_steps: int) -> LearningRate:
    """The learning rate schedule `training.scheduler`, by transformers, as a pure function of the 0-based step."""
    warmup = training.warmup_steps or round(training.warmup_ratio * total_steps)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=training.learning_rate)
    scheduler: Any = get_scheduler(training.scheduler, optimizer, warmup, total_steps)
    factor = scheduler.lr_lambdas[0] if hasattr(scheduler, "lr_lambdas") else lambda _step: 1.0
    return lambda step: training.learning_rate * float(factor(step))


def set_learning_rate(engine: Any, value: float) -> None:
    """Set the learning rate of the next optimizer step."""
    for group in engine.basic_optimizer.param_groups:
        group["lr"] = value


def gradient_norm_before_update(engine: Any) -> torch.Tensor | None:
    """Norm of the reduced gradient at stage 0, a scalar tensor; call it just before the optimizer steps.

    It also makes the optimizer skip the step if the norm is not finite. At stages 1 to 3, and with gradients in fixed
    point, the step itself does both, and this returns None.
    """
    if engine.zero_optimization_stage() > 0 or has_fixed_point_gradients(engine):
        return None
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    skip_step_unless_finite(engine.basic_optimizer, norm)
    return norm


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _deepspeed_config(
    training: TrainingSpec, config: EngineConfig, trained: int, gathered: int, vectors: int
) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Args:
        training: gradient clipping.
        config: stage, precision, offload and batch sizes.
        trained: number of trainable parameters.
        gathered: number of parameters that stage 3 gathers at once, 0 if it does so for each module.
        vectors: elements of the largest 1-D parameter. Stage 3 partitions only larger ones: norms and biases stay
            whole on every rank.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    streams = streams_states(training, config.dtype, config.zero_stage, config.offload)
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation,
        "train_batch_size": config.micro_batch_size * config.accumulation * world_size,
        "gradient_clipping": training.max_grad_norm,
        "bf16": {"enabled": config.dtype == torch.bfloat16},
        # loss_scale 0: dynamic loss scaling (Micikevicius et al. 2018, section 3.2), with DeepSpeed's default values.
        "fp16": {
            "enabled": config.dtype == torch.float16,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "zero_optimization": {
            "stage": effective_stage(config.zero_stage, config.dtype),
            "overlap_comm": torch.cuda.is_available(),
            "contiguous_gradients": config.zero_stage < 3,  # stage 3: see zero3_communication.py
            # DeepSpeed allocates a whole bucket even for a small model.
            "reduce_bucket_size": min(trained, _LARGEST_BUCKET_ELEMENTS),
            # Prefetch the next two layers.
            "stage3_prefetch_bucket_size": max(PREFETCH_ELEMENTS, 2 * gathered),
            **({"stage3_param_persistence_threshold": vectors} if gathered else {}),
            **_offload("none" if streams else config.offload),
        },
        # PyTorch's fused AdamW is vectorized on the CPU, too; DeepSpeed's CPU Adam would have to be compiled first.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,  # for our own optimizers; our tests cover them at all their stages
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
        # DeepSpeed's meter of samples per second waits for the device before and after each micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }


def _offload(offload: Offload) -> dict[str, Any]:
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    optimizer = {} if offload == "none" else {"offload_optimizer": host}
    return optimizer | ({"offload_param": host} if offload == "parameters" else {})
