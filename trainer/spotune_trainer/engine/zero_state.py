"""Where each ZeRO stage keeps the fp32 masters and the optimizer's states: DeepSpeed engine <-> checkpoint fragments.

A fragment is a contiguous range of one parameter's elements: (parameter, offset, length). At any stage and world size
the state of a rank is a list of fragments, so a checkpoint of one layout can be restored into any other.

The optimizer steps a few *master* tensors, fp32. Each state of a parameter (its master values, AdamW's moments) lies at
the same place of a master or of a tensor shaped like it. The layouts, with `zero = engine.optimizer` (DeepSpeed 0.19):

    stage  masters of a rank                       a rank's elements of a parameter         their start in the master
    -----  --------------------------------------  ---------------------------------------  --------------------------
    0      the trainable parameters themselves     all of them, on every rank               0
    1, 2   zero.single_partition_of_fp32_groups:   what of it falls into the rank's         parameter._hp_mapping
           one flat tensor per optimizer group     partition of the group; may be nothing     .hp_fragment_address
    3      zero.fp32_partitioned_groups_flat:      the rank-th of world_size equal ranges,  zero.grad_position[
           one flat tensor per sub-group           the last one padded; may be nothing        zero.get_param_id(...)]

    optimizer             where its states of a master are
    --------------------  --------------------------------------------------------------------------------------------
    torch.optim.AdamW     engine.basic_optimizer.state[master]["exp_avg" | "exp_avg_sq"], fp32, shaped like the master
    AdamW8bit             engine.basic_optimizer.moments(master, start, ...): 8-bit blocks of each slice by itself, so
    (any stage)           that no block spans two parameters
    MasterOptimizer       `elementwise_states` of each slice, fp32; `whole_states` of another size, which each rank with
                          a slice of the parameter holds (Adafactor's rows and columns)

At stage 0 all ranks hold the same, and each saves an equal share. At the other stages no element is on two ranks. All
attributes named here are private to DeepSpeed: `check_version` and the tests of all pairs of layouts guard them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import Tensor, distributed

from spotune_trainer.checkpoint.fragment import EMA, MASTER, SCHEDULE_FREE_BASE, Elements, Fragment, FragmentSource
from spotune_trainer.checkpoint.reader import schedule_free_average
from spotune_trainer.engine.fused_step import gather_weights
from spotune_trainer.engine.host_states.stream import stream_of
from spotune_trainer.engine.optimizers.adamw8bit import MOMENTS, AdamW8bit, Moments
from spotune_trainer.engine.optimizers.master_optimizer import MasterOptimizer, MasterSlice
from spotune_trainer.engine.optimizers.schedule_free import ScheduleFreeAdamW
from spotune_trainer.engine.optimizers.whole_parameters import WholeParameterOptimizer
from spotune_trainer.models.quantization.blockwise import BlockwiseTensor, DequantizedView

SUPPORTED_DEEPSPEED = "0.19."
_LOSS_SCALER = {
    "scale": "cur_scale",
    "iteration": "cur_iter",
    "lastOverflow": "last_overflow_iter",
    "hysteresis": "cur_hysteresis",
}
"""Attributes of DeepSpeed's DynamicLossScaler that change as it scales, by their names in a manifest."""
EMA_STEP = "ema_step"
"""In the optimizer's state of a master: the step count that its moving average is up to date with."""


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


def create_states(engine: Any) -> None:
    """Create the optimizer's states before its first step does. Collective at the first call.

    A checkpoint is restored into them, and most optimizers must know where in a master each parameter begins.
    """
    optimizer, masters = basic_optimizer(engine), masters_of(engine)
    is_new, stream = not optimizer.state, stream_of(optimizer)
    for master in masters:
        if isinstance(optimizer, MasterOptimizer):
            optimizer.create_state(master)
        elif not isinstance(optimizer, AdamW8bit) and not optimizer.state[master]:
            # A fused optimizer keeps `step` on the device that computes.
            device = master.device if stream is None else stream.device
            fused = bool(optimizer.param_groups[0].get("fused"))
            step = torch.zeros((), dtype=torch.float32, device=device if fused else "cpu")
            zeros = torch.zeros_like if stream is None else stream.zeros_like
            moments = {name: zeros(master) for name in MOMENTS}
            optimizer.state[master] = {"step": step, **moments}
    for piece in _master_slices(engine):
        if isinstance(optimizer, MasterOptimizer):
            optimizer.add_slice(piece)
        else:
            _elementwise_states(optimizer, piece)
    if is_new and isinstance(optimizer, WholeParameterOptimizer) and engine.zero_optimization_stage() in (1, 2):
        optimizer.find_cut_parameters(masters, engine.optimizer.dp_process_group)


def fragments_to_save(engine: Any) -> list[FragmentSource]:
    """The fragments that this rank saves. Over all ranks they cover every state of every parameter exactly once."""
    create_states(engine)
    _wait_for_host_states(engine)
    optimizer, rank, world_size = basic_optimizer(engine), engine.global_rank, engine.dp_world_size
    is_replicated = engine.zero_optimization_stage() == 0  # all ranks hold the same: each saves an equal share

    def share(length: int) -> tuple[int, int]:
        return (length * rank // world_size, length * (rank + 1) // world_size) if is_replicated else (0, length)

    fragments = []
    for piece in _master_slices(engine):
        start, stop = share(piece.length)
        if stop > start:
            elementwise = {MASTER: piece.of(piece.master.detach()), **_elementwise_states(optimizer, piece)}
            states = {name: _cut(state, start, stop) for name, state in elementwise.items()}
            fragments.append(FragmentSource(piece.parameter, piece.offset + start, states))
        if piece.offset == 0:
            for name, state in _whole_states(optimizer, piece).items():
                start, stop = share(state.numel())
                if stop > start:
                    fragments.append(FragmentSource(piece.parameter, start, {name: state[start:stop]}))
    return fragments


def fragments_to_load(engine: Any) -> list[Fragment]:
    """The fragments that this rank restores: those it holds, which at stage 0 are whole parameters.

    The caller fills their tensors. `sync_model_from_masters` then makes the engine use them.
    """
    create_states(engine)
    _wait_for_host_states(engine)
    optimizer = basic_optimizer(engine)
    fragments = []
    for piece in _master_slices(engine):
        states = {MASTER: piece.of(piece.master.detach()), **_elementwise_states_to_load(optimizer, piece)}
        fragments.append(Fragment(piece.parameter, piece.offset, states))
        for name, state in _whole_states(optimizer, piece).items():
            fragments.append(Fragment(piece.parameter, 0, {name: state}))
    return fragments


def sync_model_from_masters(engine: Any) -> None:
    """After a restore: copy the masters to the model's own parameters, and quantize restored 8-bit moments."""
    optimizer = basic_optimizer(engine)
    if isinstance(optimizer, AdamW8bit):
        optimizer.quantize_loaded_moments()
    if engine.zero_optimization_stage() > 0:
        _write_weights(engine, lambda master: master)


@contextmanager
def evaluation_weights(engine: Any) -> Iterator[None]:
    """Within it, the model's parameters are those to evaluate: with schedule-free AdamW, the averages.

    Masters and states do not change, and the parameters are afterwards bit for bit what they were. It takes temporary
    memory of one master, at stage 0 of all of them. Collective.
    """
    optimizer = basic_optimizer(engine)
    if not isinstance(optimizer, ScheduleFreeAdamW):
        yield
        return
    is_own_master = engine.zero_optimization_stage() == 0
    masters = masters_of(engine)
    kept = {master: master.detach().clone() for master in masters} if is_own_master else {}
    beta1, _ = optimizer.param_groups[0]["betas"]
    _write_weights(
        engine,
        lambda master: schedule_free_average(master.detach(), optimizer.state[master][SCHEDULE_FREE_BASE], beta1),
    )
    try:
        yield
    finally:
        _write_weights(engine, lambda master: kept.get(master, master))


@torch.no_grad()
def _write_weights(engine: Any, values_of: Callable[[Tensor], Tensor]) -> None:
    """Write to the model's own parameters the values that are computed from each of this rank's masters.

    At stages 1 and 2 the ranks then gather the low-precision parameters; at stage 3 each rank's partition is written.
    """
    stage, zero, masters = engine.zero_optimization_stage(), engine.optimizer, masters_of(engine)
    if stage == 0:
        for master in masters:
            master.data.copy_(values_of(master))
    elif stage in (1, 2):
        for index, master in enumerate(masters):
            rank = distributed.get_rank(zero.real_dp_process_group[index])
            zero.parallel_partitioned_bit16_groups[index][rank].data.copy_(values_of(master).data)
        gather_weights(zero)
    else:
        zero.checkpoint_event_prologue()
        for index, (low_precision, master) in enumerate(zip(zero.fp16_partitioned_groups_flat, masters, strict=True)):
            low_precision.data.copy_(values_of(master).data)
            zero._unflatten_partitioned_parameters(index)
        zero.checkpoint_event_epilogue()


def optimizer_step(engine: Any) -> int:
    """Number of steps that the optimizer has taken, by its own count; skipped steps are not counted."""
    for state in basic_optimizer(engine).state.values():
        return int(state["step"])
    return 0


def optimizer_scalars(engine: Any) -> dict[str, float]:
    """Numbers that the optimizer keeps for all parameters together, besides its step count; the same on all ranks."""
    optimizer = basic_optimizer(engine)
    names = optimizer.scalars if isinstance(optimizer, MasterOptimizer) else ()
    for state in optimizer.state.values():
        return {name: float(state[name]) for name in names}
    return {}


def set_optimizer_step(engine: Any, step: int, scalars: Mapping[str, float] | None = None) -> None:
    """Set the optimizer's step count, on which bias corrections depend, and what `optimizer_scalars` returned."""
    for state in basic_optimizer(engine).state.values():
        state["step"].fill_(step)
        if EMA_STEP in state:
            state[EMA_STEP].fill_(step)
        for name, value in (scalars or {}).items():
            state[name].fill_(value)


def loss_scale(engine: Any) -> dict[str, int | float] | None:
    """State of float16's dynamic loss scaling, the same on all ranks; None in other precisions."""
    if not engine.fp16_enabled():
        return None
    return {name: getattr(engine.optimizer.loss_scaler, attribute) for name, attribute in _LOSS_SCALER.items()}


def set_loss_scale(engine: Any, state: Mapping[str, int | float]) -> None:
    """Restore the dynamic loss scaling that `loss_scale` returned."""
    for name, attribute in _LOSS_SCALER.items():
        setattr(engine.optimizer.loss_scaler, attribute, state[name])


def _master_slices(engine: Any) -> Iterator[MasterSlice]:
    """All ranges of parameters that this rank holds; at most one for each parameter."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        yield from _whole_parameters(engine)
    elif stage in (1, 2):
        yield from _slices_of_flat_groups(engine)
    else:
        yield from _slices_of_partitioned_parameters(engine)


def _whole_parameters(engine: Any) -> Iterator[MasterSlice]:
    """Stage 0: a parameter is its own master."""
    for name, parameter in _trainable(engine):
        yield MasterSlice(name, tuple(parameter.shape), 0, parameter, 0, parameter.numel())


def _slices_of_flat_groups(engine: Any) -> Iterator[MasterSlice]:
    """Stages 1 and 2: DeepSpeed cuts each flattened group into equal partitions, across parameters.

    `_hp_mapping` names the piece of a parameter that is on this rank: lp_fragment_address is its place in the
    low-precision parameter, hp_fragment_address that in the master.
    """
    masters = masters_of(engine)
    for name, parameter in _trainable(engine):
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            in_parameter, in_master = mapping.lp_fragment_address, mapping.hp_fragment_address
            master = masters[mapping.param_group_index]
            yield MasterSlice(
                name, tuple(parameter.shape), in_parameter.start, master, in_master.start, in_master.numel
            )


def _slices_of_partitioned_parameters(engine: Any) -> Iterator[MasterSlice]:
    """Stage 3: DeepSpeed cuts each parameter by itself into world_size equal partitions, the last one padded."""
    zero, masters = engine.optimizer, masters_of(engine)
    for name, parameter in _trainable(engine):
        sub_group, start, partition_elements = zero.grad_position[zero.get_param_id(parameter)]
        offset = engine.global_rank * partition_elements
        length = min(partition_elements, parameter.ds_numel - offset)
        if length > 0:
            yield MasterSlice(name, tuple(parameter.ds_shape), offset, masters[sub_group], start, length)


def masters_of(engine: Any) -> list[Tensor]:
    """The tensors that the optimizer steps; at stages 1 to 3 some of a rank may be padding alone."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return [parameter for _, parameter in _trainable(engine)]
    attribute = "single_partition_of_fp32_groups" if stage < 3 else "fp32_partitioned_groups_flat"
    return list(getattr(engine.optimizer, attribute))


def _wait_for_host_states(engine: Any) -> None:
    """Before the host reads or writes states in its memory: the last step's copies to it must have ended."""
    stream = stream_of(basic_optimizer(engine))
    if stream is not None:
        stream.wait()


def _trainable(engine: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def basic_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's ZeRO optimizer."""
    optimizer: torch.optim.Optimizer = engine.basic_optimizer
    return optimizer


def _elementwise_states(optimizer: torch.optim.Optimizer, piece: MasterSlice) -> dict[str, Tensor | BlockwiseTensor]:
    """States of a slice, besides its master, with an element for each of its elements.

    AdamW8bit creates its moments when they are first asked for.
    """
    if isinstance(optimizer, AdamW8bit):
        return {**_moments(optimizer, piece).states, **_ema(optimizer, piece)}
    return {**_fp32_states(optimizer, piece), **_ema(optimizer, piece)}


def _elementwise_states_to_load(optimizer: torch.optim.Optimizer, piece: MasterSlice) -> dict[str, Tensor]:
    """The same states as tensors to write to; for 8-bit moments these are fp32 buffers."""
    if isinstance(optimizer, AdamW8bit):
        return {**_moments(optimizer, piece).tensors_to_load(), **_ema(optimizer, piece)}
    return {**_fp32_states(optimizer, piece), **_ema(optimizer, piece)}


def _whole_states(optimizer: torch.optim.Optimizer, piece: MasterSlice) -> Mapping[str, Tensor]:
    """States of the slice's parameter that have another size."""
    return optimizer.whole_states(piece) if isinstance(optimizer, MasterOptimizer) else {}


def _moments(optimizer: AdamW8bit, piece: MasterSlice) -> Moments:
    return optimizer.moments(piece.master, piece.start, piece.length, piece.parameter_elements)


def _fp32_states(optimizer: torch.optim.Optimizer, piece: MasterSlice) -> Mapping[str, Tensor]:
    if isinstance(optimizer, MasterOptimizer):
        return optimizer.elementwise_states(piece)
    return {name: piece.of(optimizer.state[piece.master][name]) for name in MOMENTS}


def _ema(optimizer: torch.optim.Optimizer, piece: MasterSlice) -> dict[str, Tensor]:
    """The moving average of a slice, if there is one (`engine/ema.py`)."""
    state = optimizer.state[piece.master]
    return {EMA: piece.of(state[EMA])} if EMA in state else {}


def _cut(state: Tensor | BlockwiseTensor, start: int, stop: int) -> Elements:
    """Elements [start, stop) of a state; 8-bit moments are dequantized as they are read."""
    return DequantizedView(state, start, stop) if isinstance(state, BlockwiseTensor) else state[start:stop]
