"""DeepSpeed engine <-> named fragments: where each ZeRO stage keeps the fp32 masters and Adam's moments.

A fragment is a contiguous run of one parameter, named by (parameter, offset, length). Whatever the stage and world
size, a rank's state is a list of fragments, so what one layout wrote any other can read. This is the only module that
knows DeepSpeed's internals (0.19): every attribute used here is private to DeepSpeed and guarded by `check_version`
and by the matrix test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor

from spotune_trainer.checkpoint.fragment import Elements, Fragment, HeldFragment
from spotune_trainer.engine.adamw import MOMENTS, AdamW8bit
from spotune_trainer.models.blockwise_quantization import Blockwise, Dequantised

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


@dataclass(frozen=True)
class _Run:
    """Where a rank keeps a run of one parameter.

    Attributes:
        parameter: its name.
        elements: of the whole parameter.
        offset: first element of the run within the parameter.
        master: tensor that the optimizer steps, with this run and others in it.
        start: first element of the run within that tensor.
        length: elements of the run.
    """

    parameter: str
    elements: int
    offset: int
    master: Tensor
    start: int
    length: int


def create_moments(engine: Any) -> None:
    """Make Adam's state, which else its first step does; with 8-bit moments it has to know where parameters begin."""
    adam = _adam(engine)
    for master in _masters(engine):
        if not isinstance(adam, AdamW8bit) and not adam.state[master]:
            # A fused optimizer keeps `step` beside the parameter.
            fused = bool(adam.param_groups[0].get("fused"))
            step = torch.zeros((), dtype=torch.float32, device=master.device if fused else "cpu")
            moments = {name: torch.zeros_like(master, memory_format=torch.preserve_format) for name in MOMENTS}
            adam.state[master] = {"step": step, **moments}
    for run in _runs(engine):
        _moments(adam, run)


def owned_fragments(engine: Any) -> list[HeldFragment]:
    """The fragments that this rank saves; over all ranks they cover every parameter exactly once."""
    create_moments(engine)
    return list(_owned(engine))


def needed_fragments(engine: Any) -> list[Fragment]:
    """The fragments that this rank restores: those it owns, or at stage 0 every parameter as a whole.

    What has been written into them is the engine's once `publish` is called.
    """
    create_moments(engine)
    return [Fragment(run.parameter, run.offset, _to_restore(_adam(engine), run)) for run in _runs(engine)]


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
    """After a restore: carry the masters over into the model's own (low-precision, gathered) parameters.

    Moments of 8 bits are quantised.
    """
    adam = _adam(engine)
    if isinstance(adam, AdamW8bit):
        adam.adopt()
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


def _runs(engine: Any) -> Iterator[_Run]:
    """All that this rank keeps."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        yield from _plain(engine)
    elif stage in (1, 2):
        yield from _partitioned_optimizer(engine)
    else:
        yield from _partitioned_parameters(engine)


def _masters(engine: Any) -> list[Tensor]:
    """The tensors that the optimizer steps; at stages 1 to 3 some of a rank may be padding alone."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return [parameter for _, parameter in _trainable(engine)]
    flats = "single_partition_of_fp32_groups" if stage < 3 else "fp32_partitioned_groups_flat"
    return list(getattr(engine.optimizer, flats))


def _trainable(engine: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def _owned(engine: Any) -> Iterator[HeldFragment]:
    rank, world = engine.global_rank, engine.dp_world_size
    is_shared = engine.zero_optimization_stage() == 0  # all ranks keep the same: each saves an even cut
    for run in _runs(engine):
        start, end = (run.length * rank // world, run.length * (rank + 1) // world) if is_shared else (0, run.length)
        states = _states(_adam(engine), run, start, end)
        if end > start:
            yield HeldFragment(run.parameter, run.offset + start, states)


def _states(adam: torch.optim.Optimizer, run: _Run, start: int, end: int) -> dict[str, Elements]:
    """Master and moments of elements [start, end) of a run."""
    moments: dict[str, Elements] = {
        name: Dequantised(moment, start, end) if isinstance(moment, Blockwise) else moment[start:end]
        for name, moment in _moments(adam, run).items()
    }
    return {"fp32": _within(run.master.detach(), run)[start:end]} | moments


def _to_restore(adam: torch.optim.Optimizer, run: _Run) -> dict[str, Tensor]:
    """Master and moments of a run, or in their place what takes them until `publish`."""
    moments = (
        adam.moments(run.master, run.start, run.length, run.elements).to_restore()
        if isinstance(adam, AdamW8bit)
        else _moments_32bit(adam, run)
    )
    return {"fp32": _within(run.master.detach(), run), **moments}


def _moments(adam: torch.optim.Optimizer, run: _Run) -> Mapping[str, Tensor | Blockwise]:
    """Both moments of a run."""
    if isinstance(adam, AdamW8bit):
        return adam.moments(run.master, run.start, run.length, run.elements).states
    return _moments_32bit(adam, run)


def _moments_32bit(adam: torch.optim.Optimizer, run: _Run) -> dict[str, Tensor]:
    return {name: _within(adam.state[run.master][name], run) for name in MOMENTS}


def _within(tensor: Tensor, run: _Run) -> Tensor:
    """The elements of a run, of a tensor as the optimizer steps it."""
    return tensor.view(-1).narrow(0, run.start, run.length)


def _plain(engine: Any) -> Iterator[_Run]:
    """Stage 0: every rank holds everything."""
    for name, parameter in _trainable(engine):
        count = parameter.numel()
        yield _Run(name, count, 0, parameter, 0, count)


def _partitioned_optimizer(engine: Any) -> Iterator[_Run]:
    """Stages 1 and 2: one flat fp32 partition for each parameter group, mapped to parameters by `_hp_mapping`."""
    masters = _masters(engine)
    for name, parameter in _trainable(engine):
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            high, offset = mapping.hp_fragment_address, mapping.lp_fragment_address.start
            master = masters[mapping.param_group_index]
            yield _Run(name, parameter.numel(), offset, master, high.start, high.numel)


def _partitioned_parameters(engine: Any) -> Iterator[_Run]:
    """Stage 3: every parameter is cut evenly over the ranks, the last cut padded."""
    optimizer, masters = engine.optimizer, _masters(engine)
    for name, parameter in _trainable(engine):
        group, start_in_group, partition = optimizer.grad_position[optimizer.get_param_id(parameter)]
        offset = engine.global_rank * partition
        length = min(partition, parameter.ds_numel - offset)
        if length > 0:
            yield _Run(name, parameter.ds_numel, offset, masters[group], start_in_group, length)
