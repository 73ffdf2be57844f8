"""Whether the job's volume has the room, the semantics and the speed that checkpoints need."""

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
from spotune.plan.parameters import TrainedParameters
from spotune_trainer import files
from spotune_trainer.checkpoint.layout import Checkpoint, list_checkpoints
from spotune_trainer.job_directory.layout import JobDirectory

_EXPORT_BYTES_PER_PARAMETER = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROBE = ".preflight-"
_BLOCK_BYTES = 8 << 20
_LEAST_BYTES = 16 << 20
_MOST_BYTES = 256 << 20
_MOST_OF_FREE = 0.1
_MOST_SECONDS = 5.0


class StorageError(InfrastructureError):
    """The volume does not do for this job."""


@dataclass(frozen=True)
class StorageNeed:
    """What a job writes.

    Attributes:
        checkpoint: bytes of one checkpoint over all workers; None where that is not known.
        export: bytes of the finished model; None where that is not known.
        keep: checkpoints that are kept; one more lies there while it is written.
        commits: that it makes at most; None: not known.
        existing: whole checkpoints that lie there already.
        keep_every_steps: steps after which a checkpoint stays for good; 0: none does.
        writers: workers that write at the same time.
    """

    checkpoint: int | None
    export: int | None
    keep: int
    existing: int
    keep_every_steps: int
    writers: int
    commits: int | None = None

    @property
    def missing_bytes(self) -> int | None:
        """What is still to be written before something is deleted; None where that is not known."""
        if self.checkpoint is None or self.export is None:
            return None
        return self.missing * self.checkpoint + self.export

    @property
    def missing(self) -> int:
        """Checkpoints that are still to find room: one at least, for nothing is deleted before the next is whole."""
        most = self.keep + 1 if self.commits is None else min(self.keep + 1, self.commits)
        return max(1, most - min(self.keep, self.existing))


def storage_need(job: FinetuneJob, parameters: TrainedParameters | None, directory: JobDirectory) -> StorageNeed:
    """What `job` writes, by the number of its parameters, or by the checkpoints that are there already."""
    spec = job.spec
    whole = [found for found in list_checkpoints(directory.checkpoints) if isinstance(found, Checkpoint)]
    size = checkpoint_bytes(parameters.count) if parameters is not None else None
    if size is None and whole:
        size = whole[-1].bytes
    frozen = parameters.frozen if parameters is not None else 0
    export = None if size is None else _export_bytes(job, size // checkpoint_bytes(1), frozen)
    return StorageNeed(
        checkpoint=size,
        export=export,
        keep=spec.checkpoint.keep,
        existing=len(whole),
        keep_every_steps=spec.checkpoint.keep_every_steps,
        writers=spec.workers.world_size,
        commits=_commits(job),
    )


def _commits(job: FinetuneJob) -> int | None:
    """That a run of so many steps makes at most: by the clock it may be one a step."""
    steps, every = job.spec.training.max_steps, job.spec.checkpoint.every
    return None if steps is None else math.ceil(steps / (every if isinstance(every, int) else 1))


def _export_bytes(job: FinetuneJob, trained: int, frozen: int) -> int:
    """The finished model: the adapter alone in float32, or all weights in the model's own precision."""
    spec = job.spec
    if spec.adapter is not None and not spec.output.merge_adapter:
        return 4 * trained
    return (trained + frozen) * _EXPORT_BYTES_PER_PARAMETER[spec.model.dtype]


def check_space(
    need: StorageNeed, root: Path, remedy: str = "Make the volume larger (storage.size), or lower checkpoint.keep"
) -> str:
    """That there is room for the checkpoints and the finished model.

    Args:
        need: what is written.
        root: folder on the volume.
        remedy: what to do where there is not.

    Raises:
        StorageError: there is not.
    """
    free = _free_bytes(root)
    if need.missing_bytes is None or need.checkpoint is None or need.export is None:
        return f"{decimal(free)} are free; how much is needed is not known, for the size of this model is not computed"
    few = need.commits is not None and need.commits <= need.keep
    why = "all that it makes" if few else "checkpoint.keep + 1"
    all_but = f"; {need.existing} there already" if need.existing else ""
    wanted = (
        f"{decimal(need.missing_bytes)} are needed: {need.missing} x {decimal(need.checkpoint)} of checkpoints "
        f"({why}{all_but}) and {decimal(need.export)} of the finished model"
    )
    if free < need.missing_bytes:
        raise StorageError(f"only {decimal(free)} are free, but {wanted}. {remedy}")
    more = f"; another {decimal(need.checkpoint)} every {need.keep_every_steps} steps (checkpoint.keepEverySteps)"
    return f"{decimal(free)} are free, {wanted}{more if need.keep_every_steps else ''}"


def check_semantics(root: Path) -> str:
    """That this user may write there, and that what commits and fencing rest on holds: fsync, rename, exclusive mkdir.

    Raises:
        StorageError: it does not.
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
    need: StorageNeed, root: Path, notice_seconds: float | None, clock: Callable[[], float] = time.monotonic
) -> str:
    """How long a commit takes at the measured speed, against the notice; one that does not fit is only warned of.

    Args:
        need: what is committed.
        root: folder to measure in.
        notice_seconds: that workers have after a spot notice; None: not known.
        clock: seconds, monotonic.

    Raises:
        StorageError: it cannot be written to.
    """
    free = _free_bytes(root)
    wanted = min(max(need.checkpoint or 0, _LEAST_BYTES), _MOST_BYTES, int(free * _MOST_OF_FREE))
    if wanted == 0:
        raise StorageError(f"only {decimal(free)} are free, too little to measure how fast {root} is")
    try:
        speed = _measure(root, wanted, clock)
    except OSError as error:
        raise StorageError(f"writing {decimal(wanted)} to {root} failed: {error.strerror or error}") from error
    measured = f"this volume takes {decimal(int(speed))} a second from one writer"
    if need.checkpoint is None:
        return f"{measured}; how long a commit takes is not known, for the size of this model is not computed"
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
        f"{notice_seconds:.0f} s: steps since the last commit are then made again. Faster storage, more workers, or "
        "commits more often (checkpoint.every) help"
    )


@contextmanager
def _probe(root: Path) -> Iterator[Path]:
    """A folder of our own, which is not there any more afterwards."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{_PROBE}*"):  # of a look that was killed
        shutil.rmtree(left, ignore_errors=True)
    folder = root / f"{_PROBE}{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace_a_file(folder: Path) -> None:
    """A commit's last step: a file that is whole on the disk takes the place of another."""
    for text in ("old", "new"):
        files.write_text(folder / "file", text)
    if (folder / "file").read_text() != "new":
        raise StorageError(f"a file that is renamed over another does not replace it in {folder.parent}: {_USE_POSIX}")


def _claim_a_folder(folder: Path) -> None:
    """Fencing: of two that make one folder the second fails, whether it makes it there or renames it to there."""
    claimed, draft = folder / "claimed", folder / "draft"
    for path in (claimed, draft):
        path.mkdir()
        files.write_text(path / "file", path.name)
    try:
        claimed.mkdir()
    except FileExistsError:
        pass
    else:
        raise StorageError(f"a folder can be made twice in {folder.parent}: {_USE_POSIX}")
    try:
        draft.rename(claimed)
    except OSError:
        return
    raise StorageError(f"a folder can be renamed onto one that is not empty in {folder.parent}: {_USE_POSIX}")


_USE_POSIX = "use a file system that keeps POSIX's rules, such as NFS, CephFS or Lustre"


def _measure(root: Path, wanted: int, clock: Callable[[], float]) -> float:
    """Bytes a second that one writer gets onto the disk, over `wanted` bytes or some seconds."""
    block = os.urandom(_BLOCK_BYTES)  # nothing that a file system could compress
    with _probe(root) as folder, (folder / "file").open("wb", buffering=0) as stream:
        started, written = clock(), 0
        while written < wanted and clock() - started < _MOST_SECONDS:
            written += stream.write(block[: wanted - written])
            os.fsync(stream.fileno())
        return written / max(clock() - started, 1e-6)


def _free_bytes(root: Path) -> int:
    """Room that an ordinary user has on the volume of a folder, which need not be there yet."""
    nearest = next(path for path in (root, *root.parents) if path.exists())
    found = os.statvfs(nearest)
    return found.f_bavail * found.f_frsize
