"""Reads and writes DeepSpeed's universal checkpoint format.

A universal checkpoint (Lian et al., "Universal Checkpointing", 2024) has one file per parameter and optimizer state,
unsharded. `deepspeed.checkpoint.ds_to_universal` converts DeepSpeed's own checkpoints of any ZeRO stage and world size
to it. The layout of DeepSpeed 0.19:

```
zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt   converted from ZeRO-3: flat tensors, and no step
zero/optimizer_state.pt                              hyperparameters; from ZeRO-3 also the step
mp_rank_00_model_states.pt                           counters and shapes; zero_pp_rank_0_mp_rank_00_... for ZeRO-3
../latest_universal                                  name of the folder
```

Both directions go parameter by parameter, so only one parameter is in memory at a time.
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
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.fragment import STATES, Fragment
from spotune_trainer.checkpoint.layout import Checkpoint
from spotune_trainer.checkpoint.reader import CheckpointReader
from spotune_trainer.checkpoint.writer import tensor_name, write_tensors

LATEST = "latest_universal"
_ZERO = "zero"
_OPTIMIZER = "optimizer_state.pt"
_STEP = "step"
_WITH_MOMENTS = ("adamw", "adamw8bit")
_MODEL_FILES = (
    f"{constants.MODEL_FILE_PREFIX}00{constants.MODEL_FILE_SUFFIX}",
    f"{constants.ZERO_FILE_PREFIX}0_{constants.MODEL_FILE_PREFIX}00{constants.MODEL_FILE_SUFFIX}",
)
"""Where an engine reads its counters: at ZeRO stages 1 and 2, and at stage 3."""


def _zero_stage_by_name(kind: type[ZeroStageEnum], name: str) -> ZeroStageEnum:
    """A safe `getattr`, with which Python 3.11.0 to 3.11.3 unpickle enum members; accepts ZeroStageEnum only."""
    if kind is not ZeroStageEnum:
        raise pickle.UnpicklingError(f"unpickling an attribute of {kind} is not allowed")
    return ZeroStageEnum[name]


_PICKLED = [LossScaler, DynamicLossScaler, ZeroStageEnum, (_zero_stage_by_name, "builtins.getattr")]
"""DeepSpeed classes that may be unpickled from its files, besides tensors and plain values; all others are rejected."""

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""


@dataclass(frozen=True)
class UniversalCheckpoint:
    """A universal checkpoint that was checked to have all states of a model's parameters.

    Attributes:
        path: its folder.
        step: training steps done, including steps that skipped the optimizer.
        optimizer_step: Adam's step count.
        shapes: shape of every parameter, by name.
    """

    path: Path
    step: int
    optimizer_step: int
    shapes: Mapping[str, tuple[int, ...]]


def check_has_moments(job: FinetuneJob) -> None:
    """Raise JobError if the job's optimizer does not have the states of a universal checkpoint: AdamW's moments."""
    optimizer = job.spec.training.optimizer
    if optimizer not in _WITH_MOMENTS:
        raise JobError(
            f"a universal checkpoint of DeepSpeed has AdamW's moments, but training.optimizer is {optimizer}: export "
            "the weights instead (spotune checkpoint export), or start a new run from them"
        )


def write_universal(checkpoint: Checkpoint, output: Path, report: ProgressCallback = lambda done, total: None) -> None:
    """Convert a run's checkpoint to a universal one, which DeepSpeed loads at ZeRO stages 1 to 3 and any world size.

    Args:
        checkpoint: the run's checkpoint; checksums of its files are not verified.
        output: the folder to write. It is renamed into place when complete; then `latest_universal` beside it names it.
        report: called with the bytes done and the total bytes.

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
    """Check that a folder is a universal checkpoint with all states of a model's trained parameters.

    Args:
        path: the folder that contains `zero`.
        shapes: shape of every trained parameter, by name. Other parameters in the folder are ignored.

    Raises:
        JobError: it is not a universal checkpoint, or lacks a parameter, or a shape differs.
    """
    if not (path / _ZERO / _OPTIMIZER).is_file():
        raise JobError(
            f"{path} is not a universal checkpoint of DeepSpeed: it has no {_ZERO}/{_OPTIMIZER}. "
            "Convert DeepSpeed's own checkpoints with python -m deepspeed.checkpoint.ds_to_universal."
        )
    for name, shape in shapes.items():
        for state in STATES:
            _load_state(path, name, state, shape)
    optimizer_step = _optimizer_step(path, next(iter(shapes)))
    return UniversalCheckpoint(path, _steps_done(path, optimizer_step), optimizer_step, shapes)


def write_single_rank_file(
    source: UniversalCheckpoint, folder: Path, report: ProgressCallback = lambda done, total: None
) -> None:
    """Write all parameters as the file of rank 0 of a checkpoint with world size 1.

    Args:
        source: the universal checkpoint.
        folder: folder of the new checkpoint. The caller writes its manifest.
        report: called with the bytes done and the total bytes.

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
    """Bytes of all fp32 states of parameters, from their numbers of elements."""
    return sum(elements.values()) * len(STATES) * 4


def _optimizer_state(parameters: int, step: Tensor) -> dict[str, Any]:
    # An engine takes each parameter group's hyperparameters from here (at stage 3, the first group's for all groups).
    # Below stage 3 it restores only as many groups as it finds. So write the largest possible number of groups, all
    # empty: the engine then keeps its own hyperparameters.
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(parameters)]
    return {
        constants.DS_VERSION: deepspeed.__version__,
        constants.PARAM_GROUPS: groups,
        constants.OPTIMIZER_STATE_DICT: {"state": {0: {_STEP: step}}, constants.PARAM_GROUPS: groups},
    }


def _model_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state that an engine restores besides parameters and moments: counters, shapes and versions."""
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
    """One state of a parameter as a memory-mapped tensor, flat."""
    file = path / _ZERO / parameter / f"{state}.pt"
    value = _load(file)
    found = value.get(constants.PARAM) if isinstance(value, dict) else value
    if not isinstance(found, Tensor):
        raise JobError(f"{file} has no tensor: this version of the universal checkpoint format is not supported")
    # A universal checkpoint that was converted from ZeRO-3 has flat tensors.
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
        raise JobError(f"{path} has no step count of its optimizer") from error


def _steps_done(path: Path, otherwise: int) -> int:
    """Training steps done by the engine, including skipped ones."""
    for file in _MODEL_FILES:
        if (path / file).is_file():
            return int(_load(path / file).get("global_steps", otherwise))
    return otherwise


def _load(file: Path) -> Any:
    """Load a file of `torch.save` safely (`weights_only`), with memory-mapped tensors."""
    try:
        with torch.serialization.safe_globals(_PICKLED):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise JobError(f"{file} is missing: the checkpoint is incomplete, or of another model") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise JobError(f"{file} cannot be read: {error}") from error
