"""Checkpoints of training functions: folders of files, committed as a worker group's own state is.

A commit is complete with its manifest, which has the checksum of every file, and it counts only if no later generation
started from an older one (`checkpoint/generations.py`). All ranks call `commit` together. The files of all ranks end
in one folder, as with Ray Train. Of files with the same name, that of the lowest rank is kept.

If a bucket keeps the job, each rank uploads the files that it has copied, and the manifest in the bucket is the commit.
A node then has the files of its own ranks only, and downloads the others before it hands over the folder.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import xxhash

from spotune.errors import JobError
from spotune.job import CheckpointSpec
from spotune_trainer import files
from spotune_trainer.bucket.checkpoints import BUCKET_FILES, fetch_manifest, put_manifest, upload_file
from spotune_trainer.bucket.client import BucketError
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.generations import raise_if_superseded
from spotune_trainer.checkpoint.layout import (
    MANIFEST,
    Checkpoint,
    CheckpointName,
    FileEntry,
    Manifest,
    UnusableCheckpoint,
    open_checkpoint,
)
from spotune_trainer.checkpoint.reader import CorruptCheckpointError, fetch, verify
from spotune_trainer.checkpoint.writer import drop_older_copies, prune
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.training_functions.ranks import Ranks

T = TypeVar("T")

_CHUNK_BYTES = 16 * 2**20
_RETRY_SECONDS = 1.0
STORAGE_ERRORS = frozenset(
    {errno.EAGAIN, errno.EDQUOT, errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT}
)
"""Numbers of the errors of a volume that is full or does not respond for a while."""


class FolderCheckpoints:
    """Commits folders of files, and reads the one that the generation starts from.

    Args:
        directory: of the job.
        generation: of the worker group.
        field: of the job that names the code, for messages.
        fingerprint: of the job, for manifests.
        plan_version: of the plan in force, for manifests.
        keep: which checkpoints stay.
        ranks: of the group; their process group is used by commits alone, which may be made in the background.
        report_problem: called with what holds up a commit, and with None afterwards, also in the background.
        show_problem: shows it, called while the training function waits: nothing else does then.
    """

    def __init__(
        self,
        directory: JobDirectory,
        generation: int,
        field: str,
        fingerprint: str,
        plan_version: int,
        keep: CheckpointSpec,
        ranks: Ranks,
        report_problem: Callable[[str | None], None],
        show_problem: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._generation = generation
        self._field = field
        self._fingerprint = fingerprint
        self._plan_version = plan_version
        self._keep = keep
        self._bucket = bucket_of(directory)
        self._whole: CheckpointName | None = None  # of which this node has all files, verified
        self._heartbeat = ranks.heartbeat
        self._has_heartbeats = False
        self._ranks = replace(ranks, heartbeat=self._beat)
        self._report_problem = report_problem
        self._show_problem = show_problem

    @contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Copied files are heartbeats while the training function waits for them. They are none in the background."""
        self._has_heartbeats = True
        try:
            yield
        finally:
            self._has_heartbeats = False

    def _beat(self) -> None:
        if self._has_heartbeats:
            self._heartbeat()

    def restore(self, name: CheckpointName) -> Path:
        """Verify a checkpoint, each rank a part of its files; returns its folder. All files are on this node.

        Raises:
            BucketError: on all ranks; the bucket cannot be read.
            CorruptCheckpointError: on all ranks, if one of them found a file that is missing or damaged.
        """
        ranks = self._ranks
        with self.heartbeats():
            nodes = ranks.gather(ranks.node)
            sharing = [rank for rank, node in enumerate(nodes) if self._bucket is None or node == ranks.node]
            part = slice(sharing.index(ranks.rank), None, len(sharing))
            folder = ranks.gather_results(lambda: self._verify(name, part))[ranks.rank]
        self._whole = name
        return folder

    def fetch(self, name: CheckpointName) -> None:
        """Have all files of a checkpoint on this node, which this group has committed. Any rank may call it alone.

        Raises:
            BucketError: the bucket cannot be read.
            CorruptCheckpointError: it has another file than was committed.
        """
        if self._bucket is not None and self._whole != name:
            with self.heartbeats():
                self._verify(name, slice(None))
            self._whole = name

    def is_output(self, name: CheckpointName) -> bool:
        """Whether a checkpoint is the model of a program, with which training does not continue.

        All ranks call it together, and have the same answer, although few nodes may have the manifest yet.

        Raises:
            BucketError: on all ranks; the bucket cannot be read.
        """
        folder = self._directory.checkpoints / str(name)
        with self.heartbeats():
            return any(self._ranks.gather_results(lambda: self._is_output(folder)))

    def _is_output(self, folder: Path) -> bool:
        if self._bucket is not None:
            fetch_manifest(self._bucket, folder)
        found = open_checkpoint(folder)
        return isinstance(found, Checkpoint) and found.manifest.is_output

    def commit(
        self, step: int, folder: Path | None, before_manifest: Callable[[], None], *, is_output: bool = False
    ) -> Checkpoint:
        """Commit the files that the ranks hand over. On return, the checkpoint is durable.

        Args:
            step: number of steps done.
            folder: of this rank's files; None: it has none.
            before_manifest: called on rank 0 once the files of all ranks are durable.
            is_output: whether the files are the model of a program, which has checkpoints of its own.

        Raises:
            JobError: no rank has a file, or a file has a name that a manifest cannot have.
            SupersededError: on all ranks; a later generation has started.
        """
        name = CheckpointName(step, self._generation)
        target, ranks = self._directory.checkpoints / str(name), self._ranks

        copied: dict[str, FileEntry] = {}

        def copy() -> list[FileEntry]:
            return self._copy(folder, target, mine, copied) if folder is not None else []

        def publish() -> Manifest | None:
            return self._publish(name, target, entries, before_manifest, is_output) if ranks.rank == 0 else None

        names = ranks.gather_results(lambda: files_of(folder, self._field) if folder is not None else [])
        mine = sorted(set(names[ranks.rank]).difference(*names[: ranks.rank]))
        entries = [entry for of_rank in self._until_stored(copy) for entry in of_rank]
        manifest, *_ = self._until_stored(publish)
        assert manifest is not None, "rank 0 has written it"
        if self._bucket is not None:
            self._until_stored(partial(fetch_manifest, self._bucket, target))
        return Checkpoint(target, name, manifest)

    def _until_stored(self, action: Callable[[], T]) -> list[T]:
        """Do something on the volume or in the bucket, again where that is full or does not respond.

        All ranks call it together, and all report what holds up one of them: rank 0 alone writes the progress. There
        are no heartbeats meanwhile: the watchdog ends what the function waits for longer than `retry.hangTimeout`.

        Returns:
            What `action` returns on each rank.
        """
        done: list[T] = []

        def attempt() -> tuple[list[T], str | None]:
            try:
                if not done:
                    done.append(action())
            except OSError as error:
                return done, self._storage_problem(error)
            return done, None

        while True:
            found = self._ranks.gather_results(attempt)
            problem = next((each for _, each in found if each is not None), None)
            self._report_problem(problem)
            if problem is None:
                return [value for values, _ in found for value in values]
            if self._has_heartbeats:
                self._show_problem()
            time.sleep(_RETRY_SECONDS)

    def _storage_problem(self, error: OSError) -> str:
        """What the volume or the bucket answers. Other errors are raised again."""
        if isinstance(error, BucketError):
            return str(error)
        if error.errno in STORAGE_ERRORS:
            return f"{error.strerror or error}: {error.filename or self._directory.checkpoints}"
        raise error

    def _publish(
        self,
        name: CheckpointName,
        target: Path,
        entries: Sequence[FileEntry],
        before_manifest: Callable[[], None],
        is_output: bool,
    ) -> Manifest:
        """Write the manifest, and delete what the checkpoint replaces."""
        if not entries:
            raise JobError(f"{self._field} saved a checkpoint without files: write to its folder first")
        before_manifest()
        raise_if_superseded(self._directory, self._generation)
        manifest = Manifest(
            step=name.step,
            generation=name.generation,
            optimizer_step=name.step,
            fingerprint=self._fingerprint,
            plan_version=self._plan_version,
            world_size=self._ranks.world_size,
            zero_stage=0,
            time=time.time(),
            files=tuple(entries),
            parameters={},
            is_output=is_output,
        )
        if self._bucket is not None:
            manifest = Manifest.from_json(put_manifest(self._bucket, target, manifest.to_json))
        else:
            files.write_json(target / MANIFEST, manifest.to_json())
            files.fsync_directory(self._directory.checkpoints)
        prune(self._directory, self._generation, self._keep.keep, self._keep.keep_every_steps)
        return manifest

    def _copy(self, folder: Path, target: Path, names: Sequence[str], copied: dict[str, FileEntry]) -> list[FileEntry]:
        """Copy files, but for those in `copied`, to which they are added. They are durable on return."""
        for name in names:
            if name in copied:
                continue
            with (folder / name).open("rb") as source:
                entry = self._write(source, target / name, name)
            if self._bucket is not None:
                upload_file(self._bucket, target, name, lambda _: self._beat())
            copied[name] = entry
        for parent in {(target / name).parent for name in names}:
            files.fsync_directory(parent)
        if self._bucket is not None:
            drop_older_copies(self._directory, CheckpointName.parse(target.name))
            self._whole = None
        return list(copied.values())

    def _write(self, source: BinaryIO, target: Path, name: str) -> FileEntry:
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, size = xxhash.xxh3_64(), 0
        try:
            with target.open("wb") as writer:
                while chunk := source.read(_CHUNK_BYTES):
                    writer.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                    self._ranks.heartbeat()
                writer.flush()
                os.fsync(writer.fileno())
        except OSError:
            target.unlink(missing_ok=True)  # frees space on a full volume
            raise
        return FileEntry(name, size, digest.hexdigest())

    def _verify(self, name: CheckpointName, part: slice) -> Path:
        """Verify a part of the files of a checkpoint, and download those that this node lacks; returns its folder."""
        folder = self._directory.checkpoints / str(name)
        if self._bucket is not None:
            fetch_manifest(self._bucket, folder)
        found = open_checkpoint(folder)
        if isinstance(found, UnusableCheckpoint):
            raise CorruptCheckpointError(str(name), found.reason)
        entries = found.manifest.files[part]
        if self._bucket is not None:
            fetch(found, entries, self._ranks.heartbeat)
            return folder
        for entry in entries:
            verify(found, [entry])
            self._ranks.heartbeat()
        return folder


def files_of(folder: Path, field: str) -> list[str]:
    """Sorted names of all files in a folder, relative to it. Links are followed.

    Args:
        folder: that the code of the user has written.
        field: of the job that names the code, for the error.

    Raises:
        JobError: a file has the name of manifests.
    """
    names = [
        str((Path(parent) / name).relative_to(folder))
        for parent, _, found in os.walk(folder, followlinks=True)
        for name in found
    ]
    for name in (MANIFEST, BUCKET_FILES):
        if name in names:
            raise JobError(f"{field} saved a file {name}, a name that checkpoints use: rename it")
    return sorted(names)
