"""Commit a checkpoint: every rank writes its fragments, rank 0 the manifest, last.

No collective is needed: a rank's `.ok` file says that its fragments are on the disk, rank 0 waits for all of them.
A rank's file is a safetensors file, so that anything can read it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from spotune_trainer import files
from spotune_trainer.checkpoint.fragment import STATES, Fragment
from spotune_trainer.checkpoint.generations import in_lineage, list_generations
from spotune_trainer.checkpoint.layout import (
    MANIFEST,
    CheckpointName,
    FileEntry,
    Manifest,
    list_folders,
    rank_file,
    rank_ok,
)
from spotune_trainer.job_directory.layout import JobDirectory

_POLL_SECONDS = 0.01


def tensor_name(parameter: str, offset: int, state: str) -> str:
    """Name of one tensor within a rank's file."""
    return f"{parameter}|{offset}|{state}"


def write_fragments(folder: Path, rank: int, fragments: Sequence[Fragment]) -> None:
    """Write this rank's file and then its `.ok`; both are on the disk when it returns.

    Raises:
        OSError: the volume does not take it; what was written in part is removed, which gives a full one room.
    """
    tensors = [
        (tensor_name(fragment.parameter, fragment.offset, state), fragment.states[state])
        for fragment in fragments
        for state in STATES
    ]
    sizes = [(name, tensor.numel()) for name, tensor in tensors]
    write_tensors(folder, rank, sizes, (tensor for _, tensor in tensors))


def write_tensors(folder: Path, rank: int, sizes: Sequence[tuple[str, int]], tensors: Iterable[Tensor]) -> None:
    """As `write_fragments`, of tensors that need not be in memory together.

    Args:
        folder: of the checkpoint.
        rank: whose file it is.
        sizes: name and number of elements of every tensor.
        tensors: in the same order; the next one is asked for when the one before has been written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    position = 0
    for name, elements in sizes:
        end = position + elements * 4
        header[name] = {"dtype": "F32", "shape": [elements], "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    path = folder / rank_file(rank)
    try:
        checksum = _write_tensors(path, encoded, tensors)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    entry = FileEntry(path.name, 8 + len(encoded) + position, checksum)
    files.write_json(folder / rank_ok(rank), {"name": entry.name, "size": entry.size, "xxh3": entry.xxh3})


def _write_tensors(path: Path, header: bytes, tensors: Iterable[Tensor]) -> str:
    """Write a safetensors file; returns the checksum of its content."""
    digest = xxhash.xxh3_64()
    with path.open("wb", buffering=0) as stream:
        for block in (struct.pack("<Q", len(header)), header):
            digest.update(block)
            _write_all(stream.fileno(), memoryview(block))
        for tensor in tensors:
            elements: Any = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
            data = memoryview(elements).cast("B")
            digest.update(data)
            _write_all(stream.fileno(), data)
        os.fsync(stream.fileno())
    return digest.hexdigest()


def arrived_so_far(folder: Path, rank: int) -> object:
    """What is there of the checkpoint that `rank` works at: another value once more has been written.

    For rank 0 whatever any rank has written, since its commit waits for all of them; for the others their own.
    """
    try:
        names = (rank_file(rank), rank_ok(rank)) if rank else (".", *(path.name for path in folder.iterdir()))
    except OSError:
        return None
    return {name: _stamp(folder / name) for name in names}


def _stamp(path: Path) -> tuple[int, int] | None:
    """Size and time of the last change; None where there is no such file, or the volume does not say."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def commit(
    directory: JobDirectory,
    name: CheckpointName,
    world_size: int,
    manifest: Callable[[tuple[FileEntry, ...]], Manifest],
) -> Manifest:
    """Rank 0: wait for every rank's `.ok`, then write the manifest. After it returns the checkpoint counts.

    A rank that never writes is lost; this group then ends with it, by Ray or by the hang guard.

    Args:
        directory: the job's folder.
        name: the checkpoint.
        world_size: number of ranks to wait for.
        manifest: makes the manifest of the ranks' files.
    """
    folder = directory.checkpoints / str(name)
    entries: list[FileEntry] = []
    for rank in range(world_size):
        while (value := files.read_json(folder / rank_ok(rank))) is None:
            time.sleep(_POLL_SECONDS)
        entries.append(FileEntry(**value))
    made = manifest(tuple(entries))
    files.write_json(folder / MANIFEST, made.to_json())
    files.fsync_directory(directory.checkpoints)
    return made


def prune(directory: JobDirectory, generation: int, keep: int, keep_every_steps: int = 0) -> list[str]:
    """Delete what this generation's commits supersede; returns the names of what went.

    Keeps the newest `keep` checkpoints of the lineage and every multiple of `keep_every_steps`; unfinished and
    passed-over folders of this and older generations go as well. Nothing of a later generation is touched, and
    nothing is deleted before this generation has a commit of its own.
    """
    generations = list_generations(directory)
    folders = list_folders(directory.checkpoints)
    names = {path: CheckpointName.parse(path.name) for path in folders}
    if not any(name.generation == generation and (path / MANIFEST).exists() for path, name in names.items()):
        return []
    lineage = [p for p in folders if (p / MANIFEST).exists() and in_lineage(names[p], generations)]
    kept = set(lineage[-keep:])
    if keep_every_steps:
        kept |= {path for path in lineage if names[path].step % keep_every_steps == 0}
    gone = [path for path in folders if path not in kept and names[path].generation <= generation]
    for path in gone:
        # The manifest goes first: a half-deleted folder is not a checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in gone]


def _write_all(descriptor: int, block: memoryview) -> None:
    """`write(2)` may write less than asked for (2 GiB at most on Linux)."""
    while block:
        block = block[os.write(descriptor, block) :]
