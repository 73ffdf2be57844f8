"""One file in a store: where it is, and which version of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

READ_BYTES = 1 << 20
"""Bytes per read of a response."""
STALLED_SECONDS = 60
"""A request without progress for this long fails."""


@dataclass(frozen=True)
class StoredFile:
    """A version of a file in a store.

    Attributes:
        url: As messages name it.
        bucket: Bucket, container or repository; the host of a web server.
        key: Its name in there.
        size: Bytes.
        version: Differs between any two contents of this file: etag, generation, hash or date, whatever the store has.
        revision: Commit of the Hub's repository that has this version; empty elsewhere.
        config: Configuration of a dataset on the Hub that it belongs to; empty where none was chosen.
        split: Split of that configuration.
    """

    url: str
    bucket: str
    key: str
    size: int
    version: str
    revision: str = ""
    config: str = ""
    split: str = ""


class ChangedFileError(Exception):
    """A file was replaced after it was found."""


class Store(Protocol):
    """A kind of store."""

    def list_files(self, bucket: str, prefix: str) -> Iterator[StoredFile]:
        """All files whose key starts with `prefix`, in the order of the store."""
        ...

    def download(self, file: StoredFile, target: Path) -> None:
        """Copy this version of a file to a path that does not exist.

        Raises:
            ChangedFileError: The store has another version now.
        """
        ...


class WritableStore(Store, Protocol):
    """A kind of store that files are written to, too."""

    def upload(self, bucket: str, key: str, content: bytes) -> None:
        """Write a file, or replace it."""
        ...

    def delete(self, bucket: str, key: str) -> None:
        """Delete a file; does nothing if there is none."""
        ...
