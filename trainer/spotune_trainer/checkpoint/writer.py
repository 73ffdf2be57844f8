"""Commit a checkpoint: every rank writes its fragments, then rank 0 writes the manifest.

Ranks do not need a collective for this. Each writes an `.ok` file once its fragments are durable, and rank 0 polls for
all of these. Fragments are stored as safetensors files, so any tool can read them.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from spotune.job import BestSpec
from spotune_trainer import files
from spotune_trainer.bucket.checkpoints import (
    BUCKET_FILES,
    delete_checkpoints,
    put_manifest,
    read_checkpoint_file,
    refresh,
    wait_for_files,
)
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.evaluations import best_evaluation
from spotune_trainer.checkpoint.fragment import Fragment, FragmentSource
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
_COPIES_IN_DIRECTORY = 2
"""Checkpoints whose files a machine keeps, if the storage is a bucket."""


def tensor_name(parameter: str, offset: int, state: str) -> str:
    """Name of one tensor within a rank's file."""
    return f"{parameter}|{offset}|{state}"


def tensor_sizes(fragments: Sequence[FragmentSource]) -> list[tuple[str, int]]:
    """Name and number of elements of every tensor in a file of these fragments, in the order of the file."""
    return [
        (tensor_name(fragment.parameter, fragment.offset, state), elements.numel())
        for fragment in fragments
        for state, elements in fragment.states.items()
    ]


def file_header(sizes: Sequence[tuple[str, int]]) -> bytes:
    """What a safetensors file of these tensors begins with. Their fp32 elements follow, one tensor after another.

    Args:
        sizes: name and number of elements of every tensor.
    """
    header: dict[str, Any] = {}
    position = 0
    for name, elements in sizes:
        start, position = position, position + elements * 4
        header[name] = {"dtype": "F32", "shape": [elements], "data_offsets": [start, position]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def write_fragments(
    folder: Path, rank: int, fragments: Sequence[Fragment], raise_if_abandoned: Callable[[], None] = lambda: None
) -> FileEntry:
    """Write this rank's file and then its `.ok` file. Both are durable on return.

    Args:
        folder: the checkpoint's folder.
        rank: the rank whose file it is.
        fragments: its fragments.
        raise_if_abandoned: called before each tensor and before the `.ok` file; what it raises ends the write.

    Returns:
        The file's entry in the manifest.

    Raises:
        OSError: the volume refuses it. A partial file is removed, which frees space on a full volume.
    """

    def tensors() -> Iterator[Tensor]:
        for fragment in fragments:
            for tensor in fragment.states.values():
                raise_if_abandoned()
                yield tensor
        raise_if_abandoned()

    return write_tensors(folder, rank, tensor_sizes(fragments), tensors())


def write_tensors(folder: Path, rank: int, sizes: Sequence[tuple[str, int]], tensors: Iterable[Tensor]) -> FileEntry:
    """Like `write_fragments`, for tensors that do not fit into memory together.

    Args:
        folder: the checkpoint's folder.
        rank: the rank whose file it is.
        sizes: name and number of elements of every tensor.
        tensors: the tensors in the same order; each is taken from the iterator after the previous one was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ok = folder / rank_ok(rank)
    if ok.exists():  # of an earlier try, which rank 0 would take for the file that is written now
        ok.unlink()
        files.fsync_directory(folder)
    header = file_header(sizes)
    path = folder / rank_file(rank)
    try:
        checksum = _write_tensors(path, header, tensors)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    entry = FileEntry(path.name, len(header) + 4 * sum(elements for _, elements in sizes), checksum)
    files.write_json(ok, {"name": entry.name, "size": entry.size, "xxh3": entry.xxh3})
    return entry


def _write_tensors(path: Path, header: bytes, tensors: Iterable[Tensor]) -> str:
    """Write a safetensors file; returns its XXH3-64 checksum in hex."""
    digest = xxhash.xxh3_64()
    with path.open("wb", buffering=0) as stream:
        digest.update(header)
        _write_all(stream.fileno(), memoryview(header))
        for tensor in tensors:
            elements: Any = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
            data = memoryview(elements).cast("B")
            digest.update(data)
            _write_all(stream.fileno(), data)
        os.fsync(stream.fileno())
    return digest.hexdigest()


def write_progress(folder: Path, rank: int) -> object:
    """A value that changes whenever more of a checkpoint has been written; only compare it for equality.

    It covers the files of all ranks on rank 0, whose commit waits for all of them, and elsewhere those of `rank`.
    """
    try:
        names = (rank_file(rank), rank_ok(rank)) if rank else (".", *(path.name for path in folder.iterdir()))
    except OSError:
        return None
    return {name: _file_state(folder / name) for name in names}


def _file_state(path: Path) -> tuple[int, int] | None:
    """Size and modification time (ns) of a file; None if it does not exist or the volume does not respond."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def commit(
    directory: JobDirectory,
    name: CheckpointName,
    world_size: int,
    make_manifest: Callable[[tuple[FileEntry, ...]], Manifest],
    raise_if_abandoned: Callable[[], None] = lambda: None,
) -> Manifest:
    """On rank 0: wait for the `.ok` file of every rank, then write the manifest. On return, the checkpoint is durable.

    This waits without a timeout. If a rank is lost, the whole worker group ends, through Ray or through the watchdog.

    Args:
        directory: the job's folder.
        name: the checkpoint.
        world_size: number of ranks to wait for.
        make_manifest: makes the manifest from the entries of all ranks' files.
        raise_if_abandoned: called while it waits, and before the manifest is written; what it raises ends the commit.
    """
    bucket = bucket_of(directory)
    if bucket is not None:
        return _commit_to_bucket(bucket, directory, name, world_size, make_manifest, raise_if_abandoned)
    folder = directory.checkpoints / str(name)
    entries: list[FileEntry] = []
    for rank in range(world_size):
        while (value := files.read_json(folder / rank_ok(rank))) is None:
            raise_if_abandoned()
            time.sleep(_POLL_SECONDS)
        entries.append(FileEntry(**value))
    manifest = make_manifest(tuple(entries))
    raise_if_abandoned()
    files.write_json(folder / MANIFEST, manifest.to_json())
    files.fsync_directory(directory.checkpoints)
    return manifest


def _commit_to_bucket(
    bucket: Bucket,
    directory: JobDirectory,
    name: CheckpointName,
    world_size: int,
    make_manifest: Callable[[tuple[FileEntry, ...]], Manifest],
    raise_if_abandoned: Callable[[], None],
) -> Manifest:
    """As `commit`. The files of all ranks are in the bucket before the manifest is."""
    wait_for_files(bucket, str(name), map(rank_ok, range(world_size)), raise_if_abandoned)

    def make() -> dict[str, Any]:
        found = [read_checkpoint_file(bucket, str(name), rank_ok(rank)) for rank in range(world_size)]
        manifest = make_manifest(tuple(FileEntry(**value) for value in found))
        raise_if_abandoned()
        return manifest.to_json()

    return Manifest.from_json(put_manifest(bucket, directory.checkpoints / str(name), make))


def prune(
    directory: JobDirectory, generation: int, keep: int, keep_every_steps: int = 0, best: BestSpec | None = None
) -> list[str]:
    """Delete the checkpoints that this generation's commits replace; returns the names of the deleted folders.

    Keeps the newest `keep` checkpoints of the lineage, and those whose step is a multiple of `keep_every_steps`. With
    `best`, it also keeps for each of the newest ones the best checkpoint before it: a run may resume from any of them.
    Deletes the others of this and older generations, including folders that are unfinished or outside of the lineage.
    Deletes nothing that comes after the newest commit of this generation, such as a later generation, or the files of
    ranks that have begun the next commit while rank 0 still completes this one; and nothing before this generation has
    a commit of its own, or once a later generation was claimed, whose driver may start from any of them. If the storage
    is a bucket, it decides what is deleted, and the copies on this machine follow.
    """
    bucket, listed = bucket_of(directory), dict[str, dict[str, int]]()
    if bucket is not None:
        listed = refresh(bucket, directory)
        for name in listed:  # unfinished ones of other machines
            (directory.checkpoints / name).mkdir(parents=True, exist_ok=True)
    generations = list_generations(directory)  # after the commit, for a driver looks for commits after its claim
    if any(later.number > generation for later in generations):
        return []
    folders = list_folders(directory.checkpoints)
    names = {path: CheckpointName.parse(path.name) for path in folders}
    own = [name.step for path, name in names.items() if name.generation == generation and (path / MANIFEST).exists()]
    if not own:
        return []
    newest = generation, max(own)
    lineage = [p for p in folders if (p / MANIFEST).exists() and in_lineage(names[p], generations)]
    kept = set(lineage[-keep:])
    if keep_every_steps:
        kept |= {path for path in lineage if names[path].step % keep_every_steps == 0}
    if best is not None:
        best_steps = {_best_step(path, best) for path in lineage[-keep:]}
        kept |= {path for path in lineage if names[path].step in best_steps}
    deleted = [path for path in folders if path not in kept and (names[path].generation, names[path].step) <= newest]
    if bucket is not None:
        delete_checkpoints(bucket, listed, (path.name for path in deleted if path.name in listed))
    for path in deleted:
        # The manifest goes first: a half-deleted folder is not a checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in deleted]


def drop_older_copies(directory: JobDirectory, current: CheckpointName) -> None:
    """Delete the files of older checkpoints from this machine. The bucket has those that count.

    Files of `current` stay, which other ranks of this machine may still write, and those of the newest other ones.
    """
    others = [folder for folder in list_folders(directory.checkpoints) if folder.name != str(current)]
    for folder in others[: 1 - _COPIES_IN_DIRECTORY]:
        known = folder / MANIFEST, folder / BUCKET_FILES
        for path in folder.rglob("*"):
            if path not in known and not path.is_dir():
                path.unlink(missing_ok=True)


def _best_step(checkpoint: Path, best: BestSpec) -> int | None:
    """Step of the best evaluation that a committed checkpoint contains; None if it has none or is damaged."""
    try:
        manifest = Manifest.from_json(files.read_json(checkpoint / MANIFEST) or {})
    except ValueError:
        return None
    evaluation = best_evaluation(manifest.evaluations, best)
    return evaluation.step if evaluation else None


def _write_all(descriptor: int, block: memoryview) -> None:
    """Repeat `write(2)`, which may write less than requested (at most 2 GiB on Linux)."""
    while block:
        block = block[os.write(descriptor, block) :]
