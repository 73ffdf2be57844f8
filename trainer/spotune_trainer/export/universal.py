"""DeepSpeed's universal checkpoints: a run's checkpoint as one, and one as the checkpoint that a run starts from.

A universal checkpoint (Lian et al., "Universal Checkpointing", 2024) is a folder with a file for each state of each
parameter, whole, as `deepspeed.checkpoint.ds_to_universal` makes it of what any stage and world size saved (0.19):

```
zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt   from ZeRO-3 flat tensors and no step
zero/optimizer_state.pt                              hyperparameters; at ZeRO-3 also the step
mp_rank_00_model_states.pt                           counters and shapes; zero_pp_rank_0_mp_rank_00_... at ZeRO-3
../latest_universal                                  name of the folder
```

Both ways go parameter by parameter, so that one of them is in memory at a time.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor

from spotune.errors import JobError
from spotune_trainer import files
from spotune_trainer.checkpoint.fragment import STATES, Fragment
from spotune_trainer.checkpoint.layout import Checkpoint
from spotune_trainer.checkpoint.reader import CheckpointReader
from spotune_trainer.checkpoint.writer import tensor_name, write_tensors

LATEST = "latest_universal"
_ZERO = "zero"
_OPTIMIZER = "optimizer_state.pt"
_STEP = "step"
_MODEL_FILES = (
    f"{constants.MODEL_FILE_PREFIX}00{constants.MODEL_FILE_SUFFIX}",
    f"{constants.ZERO_FILE_PREFIX}0_{constants.MODEL_FILE_PREFIX}00{constants.MODEL_FILE_SUFFIX}",
)
"""Where an engine looks for its counters: at stages 1 and 2, and at stage 3."""


def _stage_called(kind: type[ZeroStageEnum], name: str) -> ZeroStageEnum:
    """What Python 3.11.0 to 3.11.3 pickle a member of an enumeration as: `getattr`, here of this enumeration alone."""
    if kind is not ZeroStageEnum:
        raise pickle.UnpicklingError(f"an attribute of {kind} is not unpickled")
    return ZeroStageEnum[name]


_PICKLED = [LossScaler, DynamicLossScaler, ZeroStageEnum, (_stage_called, "builtins.getattr")]
"""Classes of DeepSpeed that may be in its files beside tensors and plain values; anything else is not unpickled."""

Report = Callable[[int, int], None]
"""Told how many bytes of how many are done."""


@dataclass(frozen=True)
class UniversalCheckpoint:
    """A universal checkpoint that has all states of all parameters of a model.

    Attributes:
        path: its folder.
        step: optimizer steps done, those that were skipped included.
        optimizer_step: Adam's step count.
        shapes: of every parameter, by name.
    """

    path: Path
    step: int
    optimizer_step: int
    shapes: Mapping[str, tuple[int, ...]]


def write_universal(checkpoint: Checkpoint, output: Path, report: Report = lambda done, total: None) -> None:
    """Write a checkpoint as a universal one, which an engine of any world size loads at ZeRO stages 1 to 3.

    Args:
        checkpoint: its files' checksums are not looked at.
        output: becomes a folder once all is in it; then `latest_universal` beside it names it.
        report: told how far it is.

    Raises:
        CorruptCheckpointError: the files do not cover every parameter.
    """
    manifest, reader = checkpoint.manifest, CheckpointReader(checkpoint)
    step = torch.tensor(float(manifest.optimizer_step))  # as torch.optim keeps it
    sizes = {name: torch.Size(shape).numel() for name, shape in manifest.parameters.items()}
    done, total = 0, _bytes(sizes)
    with files.new_directory(output) as folder:
        for name, shape in manifest.parameters.items():
            states = {state: torch.empty(sizes[name], dtype=torch.float32) for state in STATES}
            reader.restore([Fragment(name, 0, states)])
            (folder / _ZERO / name).mkdir(parents=True)
            for state, flat in states.items():
                value = {constants.PARAM: flat.view(shape), constants.CAT_DIM: 0}
                torch.save(value, folder / _ZERO / name / f"{state}.pt")
            torch.save(step, folder / _ZERO / name / f"{_STEP}.pt")
            done += _bytes({name: sizes[name]})
            report(done, total)
        torch.save(_optimizer_state(len(sizes), step), folder / _ZERO / _OPTIMIZER)
        for file in _MODEL_FILES:
            torch.save(_model_state(checkpoint), folder / file)
    files.write_text(output.parent / LATEST, output.name)


def open_universal(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> UniversalCheckpoint:
    """Look whether a folder is a universal checkpoint with all states of a model's parameters.

    Args:
        path: the folder, with `zero` in it.
        shapes: of the parameters that are trained, by name. What else is in the folder is not looked at.

    Raises:
        JobError: it is none, or lacks a parameter, or has it in another shape.
    """
    if not (path / _ZERO / _OPTIMIZER).is_file():
        raise JobError(
            f"{path} is no universal checkpoint of DeepSpeed: there is no {_ZERO}/{_OPTIMIZER} in it. "
            "python -m deepspeed.checkpoint.ds_to_universal makes one of a checkpoint of DeepSpeed's own."
        )
    for name, shape in shapes.items():
        for state in STATES:
            _load_state(path, name, state, shape)
    optimizer_step = _optimizer_step(path, next(iter(shapes)))
    return UniversalCheckpoint(path, _steps_done(path, optimizer_step), optimizer_step, shapes)


def write_whole(source: UniversalCheckpoint, folder: Path, report: Report = lambda done, total: None) -> None:
    """Write all parameters of a universal checkpoint as the file of one rank, the only one, of a run's checkpoint.

    Args:
        source: to be read.
        folder: of the checkpoint; its manifest is the caller's.
        report: told how far it is.

    Raises:
        JobError: a file of the source cannot be read.
    """
    elements = {name: torch.Size(shape).numel() for name, shape in source.shapes.items()}
    total = _bytes(elements)

    def tensors() -> Iterator[Tensor]:
        done = 0
        for name, shape in source.shapes.items():
            for state in STATES:
                yield _load_state(source.path, name, state, shape)
            done += _bytes({name: elements[name]})
            report(done, total)

    sizes = [(tensor_name(name, 0, state), count) for name, count in elements.items() for state in STATES]
    write_tensors(folder, 0, sizes, tensors())


def _bytes(elements: Mapping[str, int]) -> int:
    """Size of all states of parameters of so many elements."""
    return sum(elements.values()) * len(STATES) * 4


def _optimizer_state(parameters: int, step: Tensor) -> dict[str, Any]:
    # An engine takes each group's hyperparameters from here (at stage 3 those of the first for all), and below stage 3
    # it restores no more groups than it finds. So: as many as there can be, and nothing in them; it keeps its own.
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(parameters)]
    return {
        constants.DS_VERSION: deepspeed.__version__,
        constants.PARAM_GROUPS: groups,
        constants.OPTIMIZER_STATE_DICT: {"state": {0: {_STEP: step}}, constants.PARAM_GROUPS: groups},
    }


def _model_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What an engine restores beside parameters and moments."""
    manifest = checkpoint.manifest
    version = {constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    return {
        constants.PARAM_SHAPES: [OrderedDict((name, torch.Size(shape)) for name, shape in manifest.parameters.items())],
        constants.DS_VERSION: deepspeed.__version__,
        constants.UNIVERSAL_CHECKPOINT_INFO: version,
        "global_steps": manifest.step,
        "skipped_steps": manifest.step - manifest.optimizer_step,
        "dp_world_size": manifest.world_size,
        "mp_world_size": 1,
        "lr_scheduler": {"last_batch_iteration": manifest.step - 1},  # of DeepSpeed's own schedulers
    }


def _load_state(path: Path, parameter: str, state: str, shape: tuple[int, ...]) -> Tensor:
    """One state of a parameter, mapped: its pages are read when they are needed."""
    file = path / _ZERO / parameter / f"{state}.pt"
    value = _load(file)
    found = value.get(constants.PARAM) if isinstance(value, dict) else value
    if not isinstance(found, Tensor):
        raise JobError(f"{file} holds no tensor: it is not of a universal checkpoint that this version knows")
    # A universal checkpoint that was made from ZeRO-3 holds flat tensors.
    if tuple(found.shape) not in (shape, (torch.Size(shape).numel(),)):
        raise JobError(f"{file} has shape {list(found.shape)}, but the job's model has {list(shape)} there")
    return found.reshape(-1)


def _optimizer_step(path: Path, parameter: str) -> int:
    if (path / _ZERO / parameter / f"{_STEP}.pt").is_file():
        return int(_load(path / _ZERO / parameter / f"{_STEP}.pt"))
    value = _load(path / _ZERO / _OPTIMIZER)
    try:
        states = value[constants.OPTIMIZER_STATE_DICT]["state"]
        return int(next(iter(states.values()))[_STEP])
    except (KeyError, StopIteration) as error:
        raise JobError(f"{path} does not say how many steps its optimizer has taken") from error


def _steps_done(path: Path, otherwise: int) -> int:
    """Steps of the engine, of which some may have been skipped."""
    for file in _MODEL_FILES:
        if (path / file).is_file():
            return int(_load(path / file).get("global_steps", otherwise))
    return otherwise


def _load(file: Path) -> Any:
    """What `torch.save` wrote, tensors mapped; nothing in it is executed."""
    try:
        with torch.serialization.safe_globals(_PICKLED):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise JobError(f"{file} is missing: the checkpoint is not of the job's model, or not whole") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise JobError(f"{file} cannot be read: {error}") from error
