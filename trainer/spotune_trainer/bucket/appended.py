"""Logs in a bucket: objects cannot grow, so a log is a folder of parts, each named by its first byte.

Only the last part is ever replaced, until it has `PART_BYTES`. So what is sent is bounded, and a log of any length has
few parts. A log has one writer at a time, whose name or folder nobody else uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from spotune_trainer.bucket.client import Bucket

PART_BYTES: Final = 1 << 20
_SUFFIX: Final = ".parts"


class AppendedFile:
    """Uploads what was appended to a file since the last call.

    Args:
        bucket: the bucket.
        name: of the log in the bucket.
        path: of the file.
    """

    def __init__(self, bucket: Bucket, name: str, path: Path) -> None:
        self._bucket = bucket
        self._name = name
        self._path = path
        self._part = self._uploaded = 0

    def push(self) -> None:
        """Upload everything that the file has now. Does nothing if there is no file.

        Raises:
            BucketError: the bucket does not accept it; a later call continues.
        """
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        while self._uploaded < size:
            with self._path.open("rb") as stream:
                stream.seek(self._part)
                content = stream.read(min(PART_BYTES, size - self._part))
            self._bucket.write(f"{self._name}{_SUFFIX}/{self._part:012d}", content)
            self._uploaded = self._part + len(content)
            if len(content) == PART_BYTES:
                self._part = self._uploaded


def logs_in(sizes: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """The logs among objects: size of each part by its first byte, by the name of the log.

    Args:
        sizes: of the objects by name, as `Bucket.list` returns them.
    """
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for name, size in sizes.items():
        folder, _, part = name.rpartition("/")
        if folder.endswith(_SUFFIX) and part.isdigit():
            found[folder.removesuffix(_SUFFIX)][int(part)] = size
    return dict(found)


def pull_log(bucket: Bucket, name: str, parts: Mapping[int, int], path: Path) -> None:
    """Append to a file what the log in the bucket has more. A file that is longer than the log stays as it is.

    Args:
        bucket: the bucket.
        name: of the log.
        parts: size of each part by its first byte.
        path: of the file.
    """
    have = path.stat().st_size if path.exists() else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    for start, size in sorted(parts.items()):
        if start <= have < start + size:
            content = bucket.read_from(f"{name}{_SUFFIX}/{start:012d}", have - start)
            path.touch()
            with path.open("r+b") as stream:  # not to its end: the driver may have written the same bytes meanwhile
                stream.seek(have)
                stream.write(content)
            have += len(content)
