"""DeepSpeed engine <-> named fragments: where each ZeRO stage keeps the fp32 masters and Adam's moments.

A fragment is a contiguous run of one parameter, named by (parameter, offset, length). Whatever the stage and world
size, a rank's state is a list of fragments, so what one layout wrote any other can read. This is the only module that
knows DeepSpeed's internals (0.19): every attribute used here is private to DeepSpeed and guarded by `check_version`
and by the matrix test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch
from torch import Tensor

from spotune_trainer.checkpoint.fragment import Fragment

SUPPORTED_DEEPSPEED = "0.19."
_LOSS_SCALER = {
    "scale": "cur_scale",
    "iteration": "cur_iter",
    "lastOverflow": "last_overflow_iter",
    "hysteresis": "cur_hysteresis",
}
"""What changes in DeepSpeed's DynamicLossScaler, by its name in a manifest."""


def check_version() -> None:
    """Refuse a DeepSpeed whose internals were not tried.

    Raises:
        RuntimeError: another version is installed.
    """
    if not deepspeed.__version__.startswith(SUPPORTED_DEEPSPEED):
        raise RuntimeError(
            f"DeepSpeed {deepspeed.__version__} is installed, but checkpoints know the internals of "
            f"{SUPPORTED_DEEPSPEED}*: install deepspeed=={SUPPORTED_DEEPSPEED}*"
        )


def parameter_shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every trainable parameter by name; tied parameters once, under their first name."""
    return {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def owned_fragments(engine: Any) -> list[Fragment]:
    """The fragments that this rank saves; over all ranks they cover every parameter exactly once."""
    return list(_fragments(engine, whole=False))


def needed_fragments(engine: Any) -> list[Fragment]:
    """The fragments that this rank restores: those it owns, or at stage 0 every parameter as a whole."""
    return list(_fragments(engine, whole=True))


def optimizer_step(engine: Any) -> int:
    """Steps that the optimizer has taken, by its own count."""
    for state in _adam(engine).state.values():
        return int(state["step"])
    return 0


def set_optimizer_step(engine: Any, step: int) -> None:
    """Set Adam's step count, on which its bias correction depends."""
    for state in _adam(engine).state.values():
        state["step"].fill_(step)


def loss_scale(engine: Any) -> dict[str, int | float] | None:
    """State of float16's dynamic loss scaling, the same on all ranks; None in other precisions."""
    if not engine.fp16_enabled():
        return None
    return {name: getattr(engine.optimizer.loss_scaler, attribute) for name, attribute in _LOSS_SCALER.items()}


def set_loss_scale(engine: Any, state: Mapping[str, int | float]) -> None:
    """Go on scaling the loss from what `loss_scale` gave."""
    for name, attribute in _LOSS_SCALER.items():
        setattr(engine.optimizer.loss_scaler, attribute, state[name])


def publish(engine: Any) -> None:
    """Carry the masters over into the model's own (low-precision, gathered) parameters, after a restore."""
    stage = engine.zero_optimization_stage()
    if stage in (1, 2):
        engine.optimizer.update_lp_params()
    elif stage == 3:
        optimizer = engine.optimizer
        optimizer.checkpoint_event_prologue()
        flats = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
        for index, (low, master) in enumerate(flats):
            low.data.copy_(master.data)
            optimizer._unflatten_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()


def _adam(engine: Any) -> torch.optim.Optimizer:
    """The torch optimizer under DeepSpeed's wrapper."""
    optimizer: torch.optim.Optimizer = engine.basic_optimizer
    return optimizer


def _fragments(engine: Any, *, whole: bool) -> Iterator[Fragment]:
    stage = engine.zero_optimization_stage()
    if stage == 0:
        yield from _plain(engine, whole=whole)
    elif stage in (1, 2):
        yield from _partitioned_optimizer(engine)
    else:
        yield from _partitioned_parameters(engine)


def _trainable(engine: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def _states(adam: torch.optim.Optimizer, master: Tensor) -> dict[str, Tensor]:
    """Flat master and moments of one tensor that the optimizer steps; creates what Adam would at its first step."""
    state = adam.state[master]
    if not state:
        # torch.optim creates this lazily in the first step(); a fused optimizer keeps `step` beside the parameter.
        fused = bool(adam.param_groups[0].get("fused"))
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device if fused else "cpu")
        state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
    return {
        "fp32": master.detach().view(-1),
        "exp_avg": state["exp_avg"].view(-1),
        "exp_avg_sq": state["exp_avg_sq"].view(-1),
    }


def _cut(states: dict[str, Tensor], start: int, length: int) -> dict[str, Tensor]:
    return {name: tensor.narrow(0, start, length) for name, tensor in states.items()}


def _plain(engine: Any, *, whole: bool) -> Iterator[Fragment]:
    """Stage 0: every rank holds everything; each saves an even cut of every parameter."""
    rank, world = engine.global_rank, engine.dp_world_size
    for name, parameter in _trainable(engine):
        states = _states(_adam(engine), parameter)
        count = parameter.numel()
        start, end = (0, count) if whole else (count * rank // world, count * (rank + 1) // world)
        if end > start:
            yield Fragment(name, start, _cut(states, start, end - start))


def _partitioned_optimizer(engine: Any) -> Iterator[Fragment]:
    """Stages 1 and 2: one flat fp32 partition for each parameter group, mapped to parameters by `_hp_mapping`."""
    optimizer = engine.optimizer
    flats = [_states(_adam(engine), flat) for flat in optimizer.single_partition_of_fp32_groups]
    for name, parameter in _trainable(engine):
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            high = mapping.hp_fragment_address
            states = _cut(flats[mapping.param_group_index], high.start, high.numel)
            yield Fragment(name, mapping.lp_fragment_address.start, states)


def _partitioned_parameters(engine: Any) -> Iterator[Fragment]:
    """Stage 3: every parameter is cut evenly over the ranks, the last cut padded."""
    optimizer = engine.optimizer
    flats = [_states(_adam(engine), flat) for flat in optimizer.fp32_partitioned_groups_flat]
    for name, parameter in _trainable(engine):
        group, start_in_group, partition = optimizer.grad_position[optimizer.get_param_id(parameter)]
        offset = engine.global_rank * partition
        length = min(partition, parameter.ds_numel - offset)
        if length > 0:
            yield Fragment(name, offset, _cut(flats[group], start_in_group, length))
