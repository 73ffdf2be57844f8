"""A transformers model under DeepSpeed: ZeRO 0-3, AdamW, clipping, and the learning rate as a function of the step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel, get_scheduler

from spotune.errors import JobError
from spotune.job import TrainingSpec
from spotune.plan.memory import PREFETCH_ELEMENTS, Offload
from spotune_trainer.engine.adamw import build_optimizer
from spotune_trainer.engine.compile.gradient_accumulation_fusion import register_weight
from spotune_trainer.engine.compile.layers import compile_layers, repeated_layers
from spotune_trainer.engine.sync_free_step import leave_out_unless_finite, step_on_device
from spotune_trainer.engine.zero3_communication import communicate_in_place, keep_gathered, reduce_once
from spotune_trainer.engine.zero_state import check_version, create_moments
from spotune_trainer.models.fused_linear_cross_entropy import fuse_loss

_LARGEST_BUCKET_ELEMENTS = 500_000_000

LearningRate = Callable[[int], float]
"""Learning rate of the 0-based optimizer step."""


@dataclass(frozen=True)
class EngineConfig:
    """How a model is trained on this group of workers.

    Attributes:
        zero_stage: 0 to 3, as planned; bf16 at stage 0 runs as stage 1 (see `effective_stage`).
        micro_batch_size: samples that go through the model at once on one rank.
        accumulation: micro-batches of one optimizer step on one rank.
        dtype: parameters and activations; masters and moments are fp32.
        gradient_checkpointing: recompute activations in the backward pass.
        offload: what is kept in host memory; what a step updates there is updated by the host's processor.
        compile: whether layers and loss are compiled.
        gathered_layers: at stage 3 the weights of so many layers stay gathered until the optimizer steps.
        whole_gradients: at stage 3 gradients are added up whole on every rank, and reduced once a step.
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


def effective_stage(zero_stage: int, dtype: torch.dtype) -> int:
    """Stage 0 in low precision is run as stage 1: DeepSpeed's unsharded wrapper steps once on zero gradients."""
    return 1 if zero_stage == 0 and dtype != torch.float32 else zero_stage


def build_engine(model: PreTrainedModel, training: TrainingSpec, config: EngineConfig) -> Any:
    """Wrap `model` (its parameters in fp32 or `config.dtype`) for training; the process group must be initialised.

    Returns:
        deepspeed.DeepSpeedEngine: its `module` is the model.

    Raises:
        JobError: the device cannot compute in `config.dtype`, or the layers cannot be compiled at that stage.
    """
    check_version()
    if config.dtype == torch.float16 and not get_accelerator().is_fp16_supported():
        raise JobError("model.dtype: float16 is for GPUs; this device cannot train in it: use bfloat16 or float32")
    # The CPU shared-memory all-reduce is compiled for most of a minute at first use; gloo serves as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=_backend(), auto_mpi_discovery=False, verbose=False)
    if config.gradient_checkpointing:
        model.config.use_cache = False
        if not config.compile:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    vectors = max((parameter.numel() for parameter in model.parameters() if parameter.dim() < 2), default=0)
    if config.compile:
        _compile(model, config)
    gathered = _gather_whole_layers(model) if config.zero_stage == 3 else 0
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(model, training, compiled=config.compile and config.offload == "none"),
        config=_deepspeed_config(training, config, trained, gathered, vectors),
        dist_init_required=False,
    )
    create_moments(engine)
    step_on_device(engine)
    if engine.zero_optimization_stage() == 3:
        _at_stage_3(engine, config, gathered)
    else:
        for parameter in engine.module.parameters():
            register_weight(parameter)
    return engine


def _at_stage_3(engine: Any, config: EngineConfig, gathered: int) -> None:
    communicate_in_place(engine)
    if gathered and config.offload != "parameters":
        layers = repeated_layers(engine.module)
        let_go = {parameter for layer in _without(layers, config.gathered_layers) for parameter in layer.parameters()}
        keep_gathered(each for each in engine.module.parameters() if each not in let_go)
    if config.whole_gradients:
        reduce_once(engine.optimizer)


def _without(layers: Sequence[torch.nn.Module], number: int) -> list[torch.nn.Module]:
    """The layers but so many, evenly spaced: what comes while these compute is then seldom waited for."""
    count = len(layers)
    return [layer for index, layer in enumerate(layers) if (index + 1) * number // count == index * number // count]


def _gather_whole_layers(model: PreTrainedModel) -> int:
    """Have stage 3 gather each layer's weights as one; returns the parameters of the largest layer.

    DeepSpeed would gather those of each linear module by themselves, and its work for one takes the host longer than
    the device takes to multiply. It cannot gather layers with frozen weights so: 0.
    """
    layers = repeated_layers(model)
    if not layers or _has_frozen_weights(model):
        return 0
    deepspeed.utils.set_z3_leaf_modules(model, list({type(layer) for layer in layers}))
    return max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)


def _has_frozen_weights(model: PreTrainedModel) -> bool:
    return not all(parameter.requires_grad for parameter in model.parameters())


def _compile(model: PreTrainedModel, config: EngineConfig) -> None:
    if config.zero_stage == 3 and _has_frozen_weights(model):
        raise JobError(
            "execution.compile: layers with weights that are not trained, as beside an adapter, cannot be compiled at "
            "ZeRO stage 3: set execution.zeroStage to 2 or less, or execution.compile to false"
        )
    compile_layers(model, recompute=config.gradient_checkpointing)
    if config.dtype != torch.float16:  # its unscaled gradients are too small for half precision
        fuse_loss(model, is_compiled=True)


def learning_rate(training: TrainingSpec, total_steps: int) -> LearningRate:
    """The schedule `training.scheduler` of transformers, as a pure function of the 0-based step."""
    warmup = training.warmup_steps or round(training.warmup_ratio * total_steps)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=training.learning_rate)
    scheduler: Any = get_scheduler(training.scheduler, optimizer, warmup, total_steps)
    factor = scheduler.lr_lambdas[0] if hasattr(scheduler, "lr_lambdas") else lambda _step: 1.0
    return lambda step: training.learning_rate * float(factor(step))


def set_learning_rate(engine: Any, value: float) -> None:
    """Set the rate of the next optimizer step."""
    for group in engine.basic_optimizer.param_groups:
        group["lr"] = value


def gradient_norm_before_update(engine: Any) -> torch.Tensor | None:
    """Norm of the reduced gradient at stage 0, just before the optimizer steps; stages 1-3 compute it themselves.

    No step is taken on a gradient that is not finite. At stage 0 the fused optimizer is told not to.
    """
    if engine.zero_optimization_stage() > 0:
        return None
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    leave_out_unless_finite(engine.basic_optimizer, norm)
    return norm


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _deepspeed_config(
    training: TrainingSpec, config: EngineConfig, trained: int, gathered: int, vectors: int
) -> dict[str, Any]:
    """DeepSpeed's configuration for so many `trained` parameters, of which stage 3 gathers so many at once.

    It divides what has more elements than the largest of the vectors: norms and biases stay on every rank.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation,
        "train_batch_size": config.micro_batch_size * config.accumulation * world_size,
        "gradient_clipping": training.max_grad_norm,
        "bf16": {"enabled": config.dtype == torch.bfloat16},
        # 0: dynamic loss scaling (Micikevicius et al. 2018, section 3.2), with DeepSpeed's defaults spelled out.
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
            "contiguous_gradients": config.zero_stage < 3,  # at stage 3 they are reduced from where they are
            # DeepSpeed allocates the whole bucket, however small the model is.
            "reduce_bucket_size": min(trained, _LARGEST_BUCKET_ELEMENTS),
            # The next two layers come while one computes.
            "stage3_prefetch_bucket_size": max(PREFETCH_ELEMENTS, 2 * gathered),
            **({"stage3_param_persistence_threshold": vectors} if gathered else {}),
            **_offload(config.offload),
        },
        # PyTorch's fused AdamW has a vectorised kernel for the host, too, and nothing has to be compiled first.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,  # AdamW8bit; the matrix of layouts tests it
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }


def _offload(offload: Offload) -> dict[str, Any]:
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    optimizer = {} if offload == "none" else {"offload_optimizer": host}
    return optimizer | ({"offload_param": host} if offload == "parameters" else {})
