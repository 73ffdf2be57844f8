"""Files of a checkpoint that lies in a bucket: downloaded to the machine that reads them, and verified.

A machine keeps what it wrote or read before. Such a copy is used if it has the checksum of the manifest.
"""

from __future__ import annotations

import fcntl
import logging
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from spotune_trainer.bucket.checkpoints import BUCKET_FILES
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.memory.digests import checksum
from spotune_trainer.job_directory.layout import JobDirectory

logger = logging.getLogger("spotune.worker")

_HEADER_GUESS_BYTES = 1 << 18
_LENGTH = struct.Struct("<Q")


class DamagedFileError(Exception):
    """The bucket does not have a file as it was committed; the message says why."""


class CommittedFile(Protocol):
    """A file as the manifest records it."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def xxh3(self) -> str:
        """XXH3-64 of its content, in hex."""


class BucketFiles:
    """The files of one checkpoint in a bucket.

    Args:
        bucket: the bucket.
        folder: of the checkpoint on this machine.
    """

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self._bucket = bucket
        self._folder = folder

    @classmethod
    def of(cls, folder: Path) -> BucketFiles | None:
        """The files of a checkpoint of a job directory; None if the directory itself is the storage."""
        bucket = bucket_of(JobDirectory(folder.parent.parent))
        return cls(bucket, folder) if bucket is not None and (folder / BUCKET_FILES).exists() else None

    def header(self, file: CommittedFile) -> bytes:
        """What a file in the bucket begins with, up to its first tensor.

        A copy on this machine is not read: it would have to be verified as a whole, for its first bytes.

        Raises:
            BucketError: the bucket cannot be read.
            DamagedFileError: it has no such file, or another one than was committed.
        """
        name = self._name(file.name)
        try:
            start = self._bucket.read_start(name, _HEADER_GUESS_BYTES)
            length = _LENGTH.size + _LENGTH.unpack(start[: _LENGTH.size])[0]
            if length > file.size:
                raise DamagedFileError(f"{file.name} in the bucket has a header that is longer than the file")
            return start[:length] if length <= len(start) else self._bucket.read_start(name, length)
        except (FileNotFoundError, struct.error) as error:
            raise DamagedFileError(f"{file.name} in the bucket cannot be read: {error}") from error

    def fetch(self, files: Iterable[CommittedFile], heartbeat: Callable[[], None] = lambda: None) -> None:
        """Have these files on this machine, with their checksums. Of the processes of a machine, one downloads a file.

        Args:
            files: as the manifest records them.
            heartbeat: called after each file.

        Raises:
            BucketError: the bucket cannot be read.
            DamagedFileError: it has no such file, or another one than was committed.
        """
        for file in files:
            path = self._folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_name(f".{path.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_intact(path, file):
                    self._download(file, path)
            heartbeat()

    def _download(self, file: CommittedFile, path: Path) -> None:
        if path.exists():
            logger.warning("%s on this machine is damaged: reading the bucket", path)
        try:
            self._bucket.download(self._name(file.name), path)
        except FileNotFoundError as error:
            raise DamagedFileError(f"{file.name} is not in the bucket") from error
        if not _is_intact(path, file):
            path.unlink()
            raise DamagedFileError(f"{file.name} in the bucket does not have the checksum of its manifest")

    def _name(self, name: str) -> str:
        return f"{self._folder.parent.name}/{self._folder.name}/{name}"


def _is_intact(path: Path, file: CommittedFile) -> bool:
    try:
        with path.open("rb", buffering=0) as stream:
            return path.stat().st_size == file.size and checksum(stream) == file.xxh3
    except FileNotFoundError:
        return False
