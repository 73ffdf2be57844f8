"""Checkpoints of any state: complete or absent, with a checksum of every file, written while training goes on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from spotune.errors import JobError
from spotune_train.progress import session
from spotune_trainer.training_functions.session import Session

STATE = "state.pt"
"""File of a state that every worker has as a whole."""
_SHARDED_STATE = ".metadata"
"""File that PyTorch's distributed checkpoint writes beside the shards of a state."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that training continues from. Its files have been verified and must not be changed.

    Attributes:
        step: number of steps done.
        folder: with all files of all workers.
    """

    step: int
    folder: Path

    def load(self) -> Any:
        """The state, with its tensors on the CPU.

        Raises:
            JobError: it has none, or a sharded one.
        """
        if self.is_sharded:
            raise JobError("the state of the checkpoint is sharded: build the state and call load_into(state)")
        if not (self.folder / STATE).exists():
            raise JobError(f"{self.folder} has no {STATE}: it was not saved by spotune_train.checkpoint.save")
        return torch.load(self.folder / STATE, map_location="cpu", weights_only=False)  # our own file, verified

    def load_into(self, state: dict[str, Any]) -> None:
        """Load a sharded state into one of any other sharding, in place. All workers call it together.

        Args:
            state: with the keys of the saved one and tensors of the same shapes.

        Raises:
            JobError: the state is not sharded.
        """
        if not self.is_sharded:
            raise JobError("the state of the checkpoint is not sharded: call load()")
        group = session("checkpoint.load_into").ranks.group
        load(state, storage_reader=FileSystemReader(self.folder), process_group=group)

    @property
    def is_sharded(self) -> bool:
        """Whether its state was sharded over the workers."""
        return (self.folder / _SHARDED_STATE).exists()


def latest() -> SavedCheckpoint | None:
    """The newest checkpoint, which training continues from; None at the beginning.

    Raises:
        CorruptCheckpointError: the bucket that keeps the job has another file than was committed.
        InfrastructureError: the bucket that keeps the job cannot be read.
        JobError: this process is no worker of a job with a training function.
    """
    found = session("checkpoint.latest").newest_checkpoint()
    return SavedCheckpoint(found[0].step, found[1]) if found is not None else None


def save(
    step: int,
    state: Mapping[str, Any] | None = None,
    files: Mapping[str, Path | str] | None = None,
    *,
    wait: bool = False,
) -> None:
    """Save a checkpoint of the last step. All workers call it together.

    The state is written to a local temporary folder (`TMPDIR`) before this returns, so that training may go on and
    change it. From there it is copied to the job's storage meanwhile. The next checkpoint and the end of the function
    wait for that. If the worker group has to leave, this saves, and does not return.

    Args:
        step: number of steps done; a step that was saved already is not saved again.
        state: nested dict. If a tensor in it is a DTensor, as with FSDP2, each worker saves its shards, and any other
            number of workers can load it. Otherwise that of rank 0 is saved.
        files: files or folders to copy, by their names in the checkpoint. Each worker may have its own. Of files with
            the same name, that of the lowest rank is kept.
        wait: return once the checkpoint is durable.

    Raises:
        JobError: the step is earlier than the last one, other workers save another one, or a file has a name that is
            taken.
        InfrastructureError: the storage refuses the files of this checkpoint or of the one before.
    """
    found = session("checkpoint.save")
    is_sharded = found.begin_save(step, is_sharded=_is_sharded(state or {}))
    if is_sharded is None:
        return

    def write(folder: Path) -> None:
        if is_sharded:
            save_sharded(dict(state or {}), storage_writer=FileSystemWriter(folder), process_group=found.ranks.group)
        elif state is not None and found.ranks.rank == 0:
            torch.save(dict(state), folder / STATE)
        for name, source in (files or {}).items():
            _copy(Path(source), folder / name, folder)

    _commit(found, write, wait=wait)


def save_with(step: int, write: Callable[[Path], Any], *, wait: bool = False) -> None:
    """Save a checkpoint of the last step in the format of a library. All workers call it together.

    For example `save_with(step, engine.save_checkpoint)` of a DeepSpeed engine. Otherwise it is like `save`.

    Args:
        step: number of steps done; a step that was saved already is not saved again.
        write: writes this worker's files to a local temporary folder, which every worker has one of.
        wait: return once the checkpoint is durable.

    Raises:
        JobError: the step is earlier than the last one, or other workers save another one.
        InfrastructureError: the storage refuses the files of this checkpoint or of the one before.
    """
    found = session("checkpoint.save_with")
    if found.begin_save(step, is_sharded=False) is not None:
        _commit(found, write, wait=wait)


def _commit(found: Session, write: Callable[[Path], Any], *, wait: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix="spotune-checkpoint-"))
    discard = partial(shutil.rmtree, folder, ignore_errors=True)
    try:
        write(folder)
    except BaseException:
        discard()
        raise
    found.save(folder, discard, wait=wait)


def _copy(source: Path, target: Path, folder: Path) -> None:
    if not target.resolve().is_relative_to(folder.resolve()):
        raise JobError(f"spotune_train.checkpoint.save: a file may not be named {target.relative_to(folder)}")
    if target.exists():
        raise JobError(f"spotune_train.checkpoint.save: the name {target.relative_to(folder)} is taken: choose another")
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def _is_sharded(state: Mapping[str, Any]) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in tree_leaves(dict(state)))
