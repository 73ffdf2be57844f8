"""Files of a checkpoint that lies in a bucket: downloaded to the machine that reads them, and verified.

A machine keeps what it wrote or read before. Such a copy is used if it has the checksum of the manifest.
"""

from __future__ import annotations

import fcntl
import logging
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from spotune_trainer.bucket.checkpoints import BUCKET_FILES
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.layout import Checkpoint, FileEntry, list_folders
from spotune_trainer.checkpoint.memory.digests import checksum
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.job_directory.layout import JobDirectory

logger = logging.getLogger("spotune.worker")

_HEADER_GUESS_BYTES = 1 << 18
_LENGTH = struct.Struct("<Q")
_KEPT_LOCALLY = 2


class BucketFiles:
    """The files of one checkpoint in a bucket.

    Args:
        bucket: the bucket.
        checkpoint: the checkpoint.
    """

    def __init__(self, bucket: Bucket, checkpoint: Checkpoint) -> None:
        self._bucket = bucket
        self._checkpoint = checkpoint
        self._verified: set[str] = set()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> BucketFiles | None:
        """The files of a checkpoint of a job directory; None if the directory itself is the storage."""
        bucket = bucket_of(JobDirectory(checkpoint.path.parent.parent))
        return cls(bucket, checkpoint) if bucket is not None and (checkpoint.path / BUCKET_FILES).exists() else None

    def header(self, name: str) -> bytes:
        """What a file begins with, up to its first tensor."""
        path = self._checkpoint.path / name
        if path.exists():
            with path.open("rb") as stream:
                start = stream.read(_LENGTH.size)
                return start + stream.read(_LENGTH.unpack(start)[0])
        start = self._bucket.read_start(self._name(name), _HEADER_GUESS_BYTES)
        length = _LENGTH.size + _LENGTH.unpack(start[: _LENGTH.size])[0]
        return start[:length] if length <= len(start) else self._bucket.read_start(self._name(name), length)

    def fetch(self, entries: Iterable[FileEntry], heartbeat: Callable[[], None] = lambda: None) -> None:
        """Have these files on this machine, with the checksums of the manifest if the bucket has such files.

        Processes of a machine that need the same file download it once.

        Args:
            entries: of the files.
            heartbeat: called after each file.

        Raises:
            BucketError: the bucket cannot be read.
            CorruptCheckpointError: the bucket has no such file, or another one than was committed.
        """
        for entry in entries:
            if entry.name in self._verified:
                continue
            path = self._checkpoint.path / entry.name
            with (self._checkpoint.path / f".{entry.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_intact(path, entry):
                    self._download(entry, path)
            self._verified.add(entry.name)
            heartbeat()

    def _download(self, entry: FileEntry, path: Path) -> None:
        if path.exists():
            logger.warning("%s on this machine is damaged: reading the bucket", path)
        try:
            self._bucket.download(self._name(entry.name), path)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(str(self._checkpoint.name), f"{entry.name} is not in the bucket") from error
        if not _is_intact(path, entry):
            path.unlink()
            raise CorruptCheckpointError(
                str(self._checkpoint.name), f"{entry.name} in the bucket does not have the checksum of its manifest"
            )

    def _name(self, name: str) -> str:
        return f"{self._checkpoint.path.parent.name}/{self._checkpoint.path.name}/{name}"


def fetch_files(checkpoint: Checkpoint, heartbeat: Callable[[], None] = lambda: None) -> None:
    """Have all files of a checkpoint on this machine; does nothing if the job directory is the storage.

    Raises:
        BucketError, CorruptCheckpointError: as `BucketFiles.fetch`.
    """
    found = BucketFiles.of(checkpoint)
    if found is not None:
        found.fetch(checkpoint.manifest.files, heartbeat)


def drop_older_copies(directory: JobDirectory) -> None:
    """Delete the files of all but the newest checkpoints from this machine. The bucket has those that count."""
    for folder in list_folders(directory.checkpoints)[:-_KEPT_LOCALLY]:
        for path in folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)


def _is_intact(path: Path, entry: FileEntry) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            return path.stat().st_size == entry.size and checksum(file) == entry.xxh3
    except FileNotFoundError:
        return False
