"""Checks of the job's volume: free space, file system semantics, and write speed, as checkpoints need them."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from spotune.errors import InfrastructureError
from spotune.job import FinetuneJob
from spotune.plan.checkpoint_interval import checkpoint_bytes
from spotune.plan.execution import job_precision
from spotune.plan.parameters import TrainedParameters
from spotune_trainer import files
from spotune_trainer.checkpoint.layout import Checkpoint, list_checkpoints
from spotune_trainer.job_directory.layout import JobDirectory

_EXPORT_BYTES_PER_PARAMETER = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROBE = ".preflight-"
_BLOCK_BYTES = 8 << 20
_MIN_MEASURED_BYTES = 16 << 20
_MAX_MEASURED_BYTES = 256 << 20
_MAX_SHARE_OF_FREE = 0.1
_MAX_MEASURED_SECONDS = 5.0


class StorageError(InfrastructureError):
    """The volume cannot hold this job's checkpoints."""


@dataclass(frozen=True)
class StorageNeed:
    """What a job writes to its volume.

    Attributes:
        checkpoint: bytes of one checkpoint over all workers; None if unknown.
        export: bytes of the exported model; None if unknown. The previous one stays until the new one is complete,
            and is not in the free space.
        keep: number of newest checkpoints that are kept; one more exists while it is written.
        commits: maximum number of commits of the run; None if unknown.
        existing: number of complete checkpoints on the volume.
        keep_every_steps: `checkpoint.keepEverySteps`; 0 if no checkpoint is kept for good.
        writers: number of workers, which write at the same time.
        best: whether the best checkpoint is kept beside the newest ones.
    """

    checkpoint: int | None
    export: int | None
    keep: int
    existing: int
    keep_every_steps: int
    writers: int
    commits: int | None = None
    best: bool = False

    @property
    def kept(self) -> int:
        """Number of checkpoints that are kept: all newest ones whose best is older than them have the same best."""
        return self.keep + self.best

    @property
    def needed_bytes(self) -> int | None:
        """Bytes that are written before the first old checkpoint is deleted; None if unknown."""
        if self.checkpoint is None or self.export is None:
            return None
        return self.new_checkpoints * self.checkpoint + self.export

    @property
    def new_checkpoints(self) -> int:
        """Checkpoints that need free space; at least 1, because the next one is completed before a deletion."""
        most = self.kept + 1 if self.commits is None else min(self.kept + 1, self.commits)
        return max(1, most - min(self.kept, self.existing))


def storage_need(job: FinetuneJob, parameters: TrainedParameters | None, directory: JobDirectory) -> StorageNeed:
    """What `job` writes, computed from the number of its parameters, or else from its existing checkpoints."""
    spec = job.spec
    whole = [found for found in list_checkpoints(directory.checkpoints) if isinstance(found, Checkpoint)]
    precision = job_precision(job, parameters or TrainedParameters(1))
    size = checkpoint_bytes(parameters.count, precision.checkpoint_bytes) if parameters is not None else None
    if size is None and whole:
        size = whole[-1].bytes
    frozen = parameters.frozen if parameters is not None else 0
    export = None if size is None else _export_bytes(job, int(size / precision.checkpoint_bytes), frozen)
    return StorageNeed(
        checkpoint=size,
        export=export,
        keep=spec.checkpoint.keep,
        existing=len(whole),
        keep_every_steps=spec.checkpoint.keep_every_steps,
        writers=spec.workers.world_size,
        commits=_commits(job),
        best=spec.training.evaluation.best is not None,
    )


def _commits(job: FinetuneJob) -> int | None:
    """Maximum number of commits; an interval in time can mean one commit a step. None without `maxSteps`."""
    steps, every = job.spec.training.max_steps, job.spec.checkpoint.every
    if steps is None:
        return None
    compared_every = job.spec.training.evaluation.compared_every_steps
    best = steps // compared_every if compared_every else 0
    return min(steps, math.ceil(steps / (every if isinstance(every, int) else 1)) + best)


def _export_bytes(job: FinetuneJob, trained: int, frozen: int) -> int:
    """Bytes of the exported model: the adapter in float32, or all weights in the model's dtype; twice with EMA."""
    spec, copies = job.spec, 2 if job.spec.training.ema_decay else 1
    if spec.adapter is not None and not spec.output.merge_adapter:
        return copies * 4 * trained
    return copies * (trained + frozen) * _EXPORT_BYTES_PER_PARAMETER[spec.model.dtype]


def check_space(
    need: StorageNeed, root: Path, remedy: str = "Make the volume larger (storage.size), or lower checkpoint.keep"
) -> str:
    """Check that the volume has space for the checkpoints and the exported model.

    Args:
        need: what is written.
        root: folder on the volume; it does not have to exist.
        remedy: what the error tells the user to do.

    Returns:
        One sentence with the free and the needed bytes.

    Raises:
        StorageError: there is too little space.
    """
    free = _free_bytes(root)
    if need.needed_bytes is None or need.checkpoint is None or need.export is None:
        return f"{decimal(free)} are free; the needed space is unknown, as the size of this model type is not computed"
    few = need.commits is not None and need.commits <= need.kept
    reason = "all that it makes" if few else "checkpoint.keep + the best + 1" if need.best else "checkpoint.keep + 1"
    existing = f"; {need.existing} exist already" if need.existing else ""
    needed = (
        f"{decimal(need.needed_bytes)} are needed: {need.new_checkpoints} x {decimal(need.checkpoint)} of checkpoints "
        f"({reason}{existing}) and {decimal(need.export)} of the finished model"
    )
    if free < need.needed_bytes:
        raise StorageError(f"only {decimal(free)} are free, but {needed}. {remedy}")
    more = f"; another {decimal(need.checkpoint)} every {need.keep_every_steps} steps (checkpoint.keepEverySteps)"
    return f"{decimal(free)} are free, {needed}{more if need.keep_every_steps else ''}"


def check_file_system(root: Path) -> str:
    """Check that this user can write, and that fsync, rename and mkdir behave as commits and fencing require.

    Returns:
        One sentence with the user id and the folder.

    Raises:
        StorageError: the user cannot write, or the file system does not follow POSIX.
    """
    who = f"uid {os.getuid()}"
    try:
        with _probe(root) as folder:
            _replace_a_file(folder)
            _claim_a_folder(folder)
    except OSError as error:
        remedy = (
            "make the volume larger (storage.size)"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "give the volume to that user by fsGroup in head.podTemplate and workers.podTemplate, or by the mount "
            "options of its storage class"
        )
        raise StorageError(f"{who} cannot write to {root} ({error.strerror or error}): {remedy}") from error
    return f"{who} can write, sync, rename over files and claim folders in {root}"


def check_commit_time(
    need: StorageNeed,
    root: Path,
    notice_seconds: float | None,
    clock: Callable[[], float] = time.monotonic,
    upload: Callable[[int], float] | None = None,
) -> str:
    """Measure the storage's write speed and compare the time of a commit with the spot notice.

    Args:
        need: what is committed.
        root: folder to measure in.
        notice_seconds: time that workers have after a spot notice; None if unknown.
        clock: seconds, monotonic.
        upload: uploads some bytes to the job's bucket, and returns the bytes a second; None: the volume is the storage.

    Returns:
        One sentence with the speed and the time of a commit. It begins with WARNING where the commit is slower than
        the notice; that is no error.

    Raises:
        StorageError: the folder cannot be written to.
    """
    free = _free_bytes(root)
    num_bytes = min(max(need.checkpoint or 0, _MIN_MEASURED_BYTES), _MAX_MEASURED_BYTES, int(free * _MAX_SHARE_OF_FREE))
    if num_bytes == 0:
        raise StorageError(f"only {decimal(free)} are free, too little to measure the write speed of {root}")
    try:
        speed = upload(num_bytes) if upload is not None else _measure(root, num_bytes, clock)
    except OSError as error:
        raise StorageError(f"writing {decimal(num_bytes)} to {root} failed: {error.strerror or error}") from error
    measured = f"one writer writes {decimal(int(speed))} a second to {'the bucket' if upload else 'this volume'}"
    if need.checkpoint is None:
        return f"{measured}; the time of a commit is unknown, as the size of this model type is not computed"
    shared = need.checkpoint / speed
    apart = shared / need.writers
    span = f"{apart:.1f} s" if need.writers == 1 else f"{apart:.1f} s to {shared:.1f} s with {need.writers} writers"
    took = f"{measured}, so a commit of {decimal(need.checkpoint)} takes {span}"
    if notice_seconds is None:
        return took
    if shared <= notice_seconds:
        return f"{took}, and fits into the notice of {notice_seconds:.0f} s"
    return (
        f"WARNING: {took}, and {'may' if apart <= notice_seconds else 'does'} not fit into the notice of "
        f"{notice_seconds:.0f} s: steps since the last commit are then repeated. Use faster storage, more workers, "
        "or commit more often (checkpoint.every)"
    )


@contextmanager
def _probe(root: Path) -> Iterator[Path]:
    """A new folder for a probe; it is removed afterwards, with those of killed probes."""
    root.mkdir(parents=True, exist_ok=True)
    for abandoned in root.glob(f"{_PROBE}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    folder = root / f"{_PROBE}{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace_a_file(folder: Path) -> None:
    """Test the last step of a commit: a complete file replaces another by rename."""
    for text in ("old", "new"):
        files.write_text(folder / "file", text)
    if (folder / "file").read_text() != "new":
        raise StorageError(f"in {folder.parent} a file renamed over another does not replace it: {_USE_POSIX}")


def _claim_a_folder(folder: Path) -> None:
    """Test what fencing requires: a folder that exists can neither be made again nor be replaced by rename."""
    claimed, draft = folder / "claimed", folder / "draft"
    for path in (claimed, draft):
        path.mkdir()
        files.write_text(path / "file", path.name)
    try:
        claimed.mkdir()
    except FileExistsError:
        pass
    else:
        raise StorageError(f"in {folder.parent} a folder can be made twice: {_USE_POSIX}")
    try:
        draft.rename(claimed)
    except OSError:
        return
    raise StorageError(f"in {folder.parent} a folder can be renamed onto one that is not empty: {_USE_POSIX}")


_USE_POSIX = "use a POSIX file system, such as NFS, CephFS or Lustre"


def _measure(root: Path, num_bytes: int, clock: Callable[[], float]) -> float:
    """Durable bytes a second of one writer, measured over `num_bytes` or `_MAX_MEASURED_SECONDS`."""
    block = os.urandom(_BLOCK_BYTES)  # random, so that the file system cannot compress it
    with _probe(root) as folder, (folder / "file").open("wb", buffering=0) as stream:
        started, written = clock(), 0
        while written < num_bytes and clock() - started < _MAX_MEASURED_SECONDS:
            written += stream.write(block[: num_bytes - written])
            os.fsync(stream.fileno())
        return written / max(clock() - started, 1e-6)


def _free_bytes(root: Path) -> int:
    """Bytes that an ordinary user can still write to the volume of a folder, which does not have to exist."""
    nearest = next(path for path in (root, *root.parents) if path.exists())
    found = os.statvfs(nearest)
    return found.f_bavail * found.f_frsize
