"""Small checkpoints: a model of two parameters, split over any number of ranks, written by the real writer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from spotune_trainer.checkpoint.evaluations import Evaluation
from spotune_trainer.checkpoint.fragment import STATES, Fragment
from spotune_trainer.checkpoint.layout import CheckpointName, FileEntry, Manifest
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
