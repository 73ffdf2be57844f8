"""A folder in a store that files are written to."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final, cast

from spotune.errors import JobError
from spotune_trainer.data.stores.find import open_store, split_url, with_retries
from spotune_trainer.data.stores.stored_file import StoredFile, WritableStore

WRITABLE_SCHEMES: Final = ("s3", "gs", "az")


class StoredFolder:
    """The files whose keys begin with the folder's.

    All methods raise JobError if the bucket is missing or access is denied, and InfrastructureError if the store did
    not answer.

    Args:
        url: Of the folder.

    Attributes:
        url: The same, without a slash at the end.

    Raises:
        JobError: Nothing can be written to such a URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme, _, place = self.url.partition("://")
        if scheme not in WRITABLE_SCHEMES or not place:
            known = ", ".join(f"{name}://" for name in WRITABLE_SCHEMES)
            raise JobError(f"{url}: shards are written to {known} with the name of a bucket, or to a path")
        self._scheme, self._bucket, key = split_url(self.url)
        self._prefix = f"{key}/" if key else ""

    @property
    def _store(self) -> WritableStore:
        return cast("WritableStore", open_store(self._scheme))

    def list_files(self, below: str = "") -> dict[str, StoredFile]:
        """All files whose name begins with ``below``, by their name relative to the folder."""
        prefix = self._prefix + below
        found = with_retries(self.url, lambda: list(self._store.list_files(self._bucket, prefix)))
        return {file.key.removeprefix(self._prefix): file for file in found}

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        file = self.list_files(name).get(name)
        if file is None:
            return None
        with tempfile.TemporaryDirectory() as temporary:
            target = Path(temporary) / "content"
            self.copy(file, target)
            return target.read_bytes()

    def copy(self, file: StoredFile, target: Path) -> None:
        """Copy a file of the folder to a path."""

        def attempt() -> None:
            target.unlink(missing_ok=True)
            self._store.download(file, target)

        with_retries(file.url, attempt)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it."""
        key = self._prefix + name
        with_retries(f"{self.url}/{name}", lambda: self._store.upload(self._bucket, key, content), "written")

    def delete(self, name: str) -> None:
        """Delete a file; does nothing if there is none."""
        key = self._prefix + name
        with_retries(f"{self.url}/{name}", lambda: self._store.delete(self._bucket, key), "deleted")
