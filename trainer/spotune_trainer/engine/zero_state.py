"""Where each ZeRO stage keeps the fp32 masters and Adam's moments: DeepSpeed engine <-> checkpoint fragments.

A fragment is a contiguous range of one parameter's elements: (parameter, offset, length). At any stage and world size
the state of a rank is a list of fragments, so a checkpoint of one layout can be restored into any other.

Adam steps a few *master* tensors, fp32. Each state of a parameter (its master values and both moments) lies at the same
place of a master or of a tensor shaped like it. The layouts, with `zero = engine.optimizer` (DeepSpeed 0.19):

    stage  masters of a rank                       a rank's elements of a parameter         their start in the master
    -----  --------------------------------------  ---------------------------------------  --------------------------
    0      the trainable parameters themselves     all of them, on every rank               0
    1, 2   zero.single_partition_of_fp32_groups:   what of it falls into the rank's         parameter._hp_mapping
           one flat tensor per optimizer group     partition of the group; may be nothing     .hp_fragment_address
    3      zero.fp32_partitioned_groups_flat:      the rank-th of world_size equal ranges,  zero.grad_position[
           one flat tensor per sub-group           the last one padded; may be nothing        zero.get_param_id(...)]

    optimizer             where the moments of a master are
    --------------------  --------------------------------------------------------------------------------------------
    torch.optim.AdamW     engine.basic_optimizer.state[master]["exp_avg" | "exp_avg_sq"], fp32, shaped like the master
    AdamW8bit             engine.basic_optimizer.moments(master, start, ...): 8-bit blocks of each slice by itself, so
    (any stage)           that no block spans two parameters

At stage 0 all ranks hold the same, and each saves an equal share. At the other stages no element is on two ranks. All
attributes named here are private to DeepSpeed: `check_version` and the tests of all pairs of layouts guard them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor

from spotune_trainer.checkpoint.fragment import Elements, Fragment, FragmentSource
from spotune_trainer.engine.adamw import MOMENTS, AdamW8bit
from spotune_trainer.models.blockwise_quantization import BlockwiseTensor, DequantizedView

SUPPORTED_DEEPSPEED = "0.19."
_LOSS_SCALER = {
    "scale": "cur_scale",
    "iteration": "cur_iter",
    "lastOverflow": "last_overflow_iter",
    "hysteresis": "cur_hysteresis",
}
"""Attributes of DeepSpeed's DynamicLossScaler that change as it scales, by their names in a manifest."""


def check_version() -> None:
    """Refuse a DeepSpeed version that the engine was not tested with.

    Raises:
        RuntimeError: another version is installed.
    """
    if not deepspeed.__version__.startswith(SUPPORTED_DEEPSPEED):
        raise RuntimeError(
            f"DeepSpeed {deepspeed.__version__} is installed, but the trainer uses internals of "
            f"{SUPPORTED_DEEPSPEED}*: install deepspeed=={SUPPORTED_DEEPSPEED}*"
        )


def parameter_shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each trainable parameter by name; a tied parameter appears once, under its first name."""
    return {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in _trainable(engine)}


def create_moments(engine: Any) -> None:
    """Create Adam's state before its first step does.

    A checkpoint is restored into it, and AdamW8bit must know where in a master each parameter begins.
    """
    adam = _adam(engine)
    for master in _masters(engine):
        if not isinstance(adam, AdamW8bit) and not adam.state[master]:
            # A fused optimizer keeps `step` on the parameter's device.
            fused = bool(adam.param_groups[0].get("fused"))
            step = torch.zeros((), dtype=torch.float32, device=master.device if fused else "cpu")
            moments = {name: torch.zeros_like(master, memory_format=torch.preserve_format) for name in MOMENTS}
            adam.state[master] = {"step": step, **moments}
    for piece in _master_slices(engine):
        _moments(adam, piece)


def fragments_to_save(engine: Any) -> list[FragmentSource]:
    """The fragments that this rank saves. Over all ranks they cover every parameter exactly once."""
    create_moments(engine)
    rank, world_size = engine.global_rank, engine.dp_world_size
    is_replicated = engine.zero_optimization_stage() == 0  # all ranks hold the same: each saves an equal share
    fragments = []
    for piece in _master_slices(engine):
        start, stop = 0, piece.length
        if is_replicated:
            start, stop = piece.length * rank // world_size, piece.length * (rank + 1) // world_size
        if stop > start:
            states = _states_to_save(_adam(engine), piece, start, stop)
            fragments.append(FragmentSource(piece.parameter, piece.offset + start, states))
    return fragments


def fragments_to_load(engine: Any) -> list[Fragment]:
    """The fragments that this rank restores: those it holds, which at stage 0 are whole parameters.

    The caller fills their tensors. `sync_model_from_masters` then makes the engine use them.
    """
    create_moments(engine)
    return [
        Fragment(piece.parameter, piece.offset, _states_to_load(_adam(engine), piece))
        for piece in _master_slices(engine)
    ]


def sync_model_from_masters(engine: Any) -> None:
    """After a restore: copy the masters to the model's own parameters, and quantize restored 8-bit moments.

    At stages 1 and 2 the low-precision parameters are all-gathered; at stage 3 each rank's partition is written.
    """
    adam = _adam(engine)
    if isinstance(adam, AdamW8bit):
        adam.quantize_loaded_moments()
    stage = engine.zero_optimization_stage()
    if stage in (1, 2):
        engine.optimizer.update_lp_params()
    elif stage == 3:
        zero = engine.optimizer
        zero.checkpoint_event_prologue()
        flats = zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True)
        for index, (low_precision, master) in enumerate(flats):
            low_precision.data.copy_(master.data)
            zero._unflatten_partitioned_parameters(index)
        zero.checkpoint_event_epilogue()


def optimizer_step(engine: Any) -> int:
    """Number of steps that Adam has taken, by its own count; skipped steps are not counted."""
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
    """Restore the dynamic loss scaling that `loss_scale` returned."""
    for name, attribute in _LOSS_SCALER.items():
        setattr(engine.optimizer.loss_scaler, attribute, state[name])


@dataclass(frozen=True)
class _MasterSlice:
    """Where a rank holds a range of one parameter's elements.

    Attributes:
        parameter: its name.
        parameter_elements: number of elements of the whole parameter.
        offset: first element of the range within the parameter.
        master: tensor that Adam steps; it holds this range and those of other parameters.
        start: first element of the range within the master.
        length: number of elements of the range.
    """

    parameter: str
    parameter_elements: int
    offset: int
    master: Tensor
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of the master, or of a tensor shaped like it; a view in one dimension."""
        return tensor.view(-1).narrow(0, self.start, self.length)


def _master_slices(engine: Any) -> Iterator[_MasterSlice]:
    """All ranges of parameters that this rank holds; at most one for each parameter."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        yield from _whole_parameters(engine)
    elif stage in (1, 2):
        yield from _slices_of_flat_groups(engine)
    else:
        yield from _slices_of_partitioned_parameters(engine)


def _whole_parameters(engine: Any) -> Iterator[_MasterSlice]:
    """Stage 0: a parameter is its own master."""
    for name, parameter in _trainable(engine):
        yield _MasterSlice(name, parameter.numel(), 0, parameter, 0, parameter.numel())


def _slices_of_flat_groups(engine: Any) -> Iterator[_MasterSlice]:
    """Stages 1 and 2: DeepSpeed cuts each flattened group into equal partitions, across parameters.

    `_hp_mapping` names the piece of a parameter that is on this rank: lp_fragment_address is its place in the
    low-precision parameter, hp_fragment_address that in the master.
    """
    masters = _masters(engine)
    for name, parameter in _trainable(engine):
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            in_parameter, in_master = mapping.lp_fragment_address, mapping.hp_fragment_address
            master = masters[mapping.param_group_index]
            yield _MasterSlice(name, parameter.numel(), in_parameter.start, master, in_master.start, in_master.numel)


def _slices_of_partitioned_parameters(engine: Any) -> Iterator[_MasterSlice]:
    """Stage 3: DeepSpeed cuts each parameter by itself into world_size equal partitions, the last one padded."""
    zero, masters = engine.optimizer, _masters(engine)
    for name, parameter in _trainable(engine):
        sub_group, start, partition_elements = zero.grad_position[zero.get_param_id(parameter)]
        offset = engine.global_rank * partition_elements
        length = min(partition_elements, parameter.ds_numel - offset)
        if length > 0:
            yield _MasterSlice(name, parameter.ds_numel, offset, masters[sub_group], start, length)


def _masters(engine: Any) -> list[Tensor]:
    """The tensors that Adam steps; at stages 1 to 3 some of a rank may be padding alone."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return [parameter for _, parameter in _trainable(engine)]
    attribute = "single_partition_of_fp32_groups" if stage < 3 else "fp32_partitioned_groups_flat"
    return list(getattr(engine.optimizer, attribute))


def _trainable(engine: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def _adam(engine: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's ZeRO optimizer."""
    optimizer: torch.optim.Optimizer = engine.basic_optimizer
    return optimizer


def _states_to_save(adam: torch.optim.Optimizer, piece: _MasterSlice, start: int, stop: int) -> dict[str, Elements]:
    """Master and moments of elements [start, stop) of a slice; 8-bit moments are dequantized as they are read."""
    moments: dict[str, Elements] = {
        name: DequantizedView(moment, start, stop) if isinstance(moment, BlockwiseTensor) else moment[start:stop]
        for name, moment in _moments(adam, piece).items()
    }
    return {"fp32": piece.of(piece.master.detach())[start:stop]} | moments


def _states_to_load(adam: torch.optim.Optimizer, piece: _MasterSlice) -> dict[str, Tensor]:
    """Master and moments of a slice as tensors to write to; for 8-bit moments these are fp32 buffers."""
    if isinstance(adam, AdamW8bit):
        moments = adam.moments(piece.master, piece.start, piece.length, piece.parameter_elements).tensors_to_load()
    else:
        moments = _fp32_moments(adam, piece)
    return {"fp32": piece.of(piece.master.detach()), **moments}


def _moments(adam: torch.optim.Optimizer, piece: _MasterSlice) -> Mapping[str, Tensor | BlockwiseTensor]:
    """Both moments of a slice; AdamW8bit creates them when they are first asked for."""
    if isinstance(adam, AdamW8bit):
        return adam.moments(piece.master, piece.start, piece.length, piece.parameter_elements).states
    return _fp32_moments(adam, piece)


def _fp32_moments(adam: torch.optim.Optimizer, piece: _MasterSlice) -> Mapping[str, Tensor]:
    return {name: piece.of(adam.state[piece.master][name]) for name in MOMENTS}
