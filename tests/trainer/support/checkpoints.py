"""Small checkpoints: a model of two parameters, split over any number of ranks, written by the real writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from spotune.job import CheckpointSpec
from spotune.plan.devices import machine_memory_bytes
from spotune_trainer.checkpoint.async_checkpointer import AsyncCheckpointer
from spotune_trainer.checkpoint.evaluations import Evaluation
from spotune_trainer.checkpoint.fragment import STATES, Fragment
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, FileEntry, Manifest
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.restore import Restore, RestoredBytes
from spotune_trainer.checkpoint.writer import commit, write_fragments
from spotune_trainer.job_directory.layout import JobDirectory

SHAPES = {"layer.weight": (5, 7), "layer.bias": (3,)}

State = Mapping[str, Tensor]
"""Flat, unsplit tensors by "parameter/state"."""


def make_state(seed: int = 0) -> State:
    """Random master weights and moments."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    return {
        f"{name}/{state}": torch.randn(size, generator=generator) for name, size in sizes.items() for state in STATES
    }


def fragments_of_rank(state: State, world_size: int, rank: int) -> list[Fragment]:
    """The fragments of a rank: an even split of every parameter; of a small one, some ranks may own nothing."""
    fragments = []
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        start, end = size * rank // world_size, size * (rank + 1) // world_size
        if end > start:
            fragments.append(Fragment(name, start, {each: state[f"{name}/{each}"][start:end] for each in STATES}))
    return fragments


def commit_checkpoint(
    directory: JobDirectory,
    step: int,
    generation: int,
    world_size: int = 1,
    state: State | None = None,
    evaluations: tuple[Evaluation, ...] = (),
) -> CheckpointName:
    """Commit a checkpoint like a worker group does."""
    name = CheckpointName(step, generation)
    state = make_state(step) if state is None else state
    for rank in range(world_size):
        write_fragments(directory.checkpoints / str(name), rank, fragments_of_rank(state, world_size, rank))
    commit(directory, name, world_size, lambda entries: replace(make_manifest(name, entries), evaluations=evaluations))
    return name


def make_manifest(name: CheckpointName, entries: tuple[FileEntry, ...]) -> Manifest:
    """The manifest of a checkpoint that consists of these files."""
    return Manifest(
        step=name.step,
        generation=name.generation,
        optimizer_step=name.step,
        fingerprint="0123",
        plan_version=1,
        world_size=len(entries),
        zero_stage=2,
        time=1_700_000_000.0,
        files=entries,
        parameters=SHAPES,
    )


def make_checkpointers(directory: JobDirectory, memories: Sequence[RankMemory | None]) -> list[AsyncCheckpointer]:
    """A checkpointer for each rank, with its memory. All of the machine's is free, whatever else runs on it."""
    for memory in memories:
        if memory is not None:
            memory.free_bytes = machine_memory_bytes
    return [
        AsyncCheckpointer(directory, rank, len(memories), CheckpointSpec(keep=9), memory=memory)
        for rank, memory in enumerate(memories)
    ]


def commit_step(ranks: Sequence[AsyncCheckpointer], step: int) -> None:
    """Commit the state of a step on all ranks, and wait until it is durable."""
    name, state = CheckpointName(step, 1), make_state(step)
    for rank, checkpointer in reversed(list(enumerate(ranks))):
        checkpointer.save(name, fragments_of_rank(state, len(ranks), rank), partial(make_manifest, name))
    for checkpointer in ranks:
        checkpointer.wait()


def restore(checkpoint: Checkpoint, memories: Sequence[RankMemory | None]) -> tuple[State, RestoredBytes]:
    """What ranks with these memories restore together, and from where.

    Raises:
        DamagedMemoryError: they restored other bytes from memory than those that were committed.
    """
    state = {name: torch.full_like(tensor, torch.nan) for name, tensor in make_state().items()}
    restores = [
        Restore(checkpoint, fragments_of_rank(state, len(memories), rank), memory)
        for rank, memory in enumerate(memories)
    ]
    files = sorted(set().union(*(each.volume_files for each in restores)))
    read = [each.read(files[rank :: len(memories)]) for rank, each in enumerate(restores)]
    for each in restores:
        each.check_memory()
    return state, sum(read, RestoredBytes())


def wipe_volume(checkpoint: Checkpoint) -> None:
    """Overwrite the files of a checkpoint: whoever reads them notices."""
    for entry in checkpoint.manifest.files:
        (checkpoint.path / entry.name).write_bytes(bytes(entry.size))
