"""The files of a dataset on this machine: read in place, or downloaded once for all processes of the node.

A download is written under a temporary name, checked against the index, and renamed; one file lock per shard keeps
the processes of a node from downloading it twice. The kernel drops such a lock with its process, so a process killed at
any moment leaves nothing that could block or mislead the next one. The cache survives restarts.

The transfers themselves (s3, gs, az, hf) are MosaicML streaming's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from streaming.base.compression import decompress
from streaming.base.format import FileInfo
from streaming.base.hashing import get_hash, is_hash
from streaming.base.storage import CloudDownloader

from spotune.errors import DataError, InfrastructureError, JobError, SpotuneError

Result = TypeVar("Result")

ATTEMPTS = 4
FIRST_DELAY = 0.5  # seconds before the second attempt, doubled before each one after it
TIMEOUT = 60.0  # seconds that a download may make no progress

# What the clients of the stores call "the object or the right to it is not there"; anything else may heal by itself.
_USERS_FAULT = frozenset({
    "403", "404", "AccessDenied", "ClientAuthenticationError", "DefaultCredentialsError", "EntryNotFoundError",
    "FileNotFoundError", "Forbidden", "GatedRepoError", "InvalidAccessKeyId", "NoCredentialsError", "NoSuchBucket",
    "NoSuchKey", "NotFound", "PermissionError", "RemoteEntryNotFoundError", "RepositoryNotFoundError",
    "ResourceNotFoundError", "SignatureDoesNotMatch",
})  # fmt: skip


class DamagedFileError(DataError):
    """A stored file is not what the index of its dataset says."""


class FileSource:
    """Where a dataset lies: a folder, or a URL with one of the schemes ``s3``, ``gs``, ``az`` and ``hf``.

    Args:
        source: As written in the job, with relative paths already made absolute.

    Raises:
        JobError: The scheme is unknown, or what it needs is missing from the environment.
    """

    def __init__(self, source: str) -> None:
        self.source = source.rstrip("/")
        self.folder = None if "://" in source else Path(source)
        self._url = _streaming_url(self.source)
        self._closing = threading.Event()
        self._downloader = CloudDownloader.get(self._url)

    def close(self) -> None:
        """Make waiting attempts in other threads end now."""
        self._closing.set()

    def download(self, basename: str, target: Path) -> None:
        """Copy one file of the dataset to ``target``, which must not exist. One attempt; the client's errors."""
        self._downloader.download(f"{self._url}/{basename}", str(target), TIMEOUT)

    def retry(self, what: str, attempt: Callable[[], Result]) -> Result:
        """The result of ``attempt``, called again after growing pauses when it fails.

        Raises:
            DataError: The last attempt found the file missing, forbidden or damaged.
            InfrastructureError: The last attempt failed for any other reason.
        """
        delay = FIRST_DELAY
        for _ in range(ATTEMPTS - 1):
            try:
                return attempt()
            except Exception:  # noqa: BLE001 - the clients of five stores share no base class; the last one is raised
                if self._closing.wait(delay):
                    break
                delay *= 2
        try:
            return attempt()
        except Exception as error:
            raise self._explained(what, error) from error

    def _explained(self, what: str, error: Exception) -> SpotuneError:
        place = f"{what} of {self.source} could not be read in {ATTEMPTS} attempts"
        if isinstance(error, DamagedFileError):
            return DataError(f"{place}: {error}. Upload it again, or write the dataset again with `spotune shard`.")
        detail = " ".join(str(error).split()) or type(error).__name__
        response = getattr(error, "response", None)  # botocore's errors carry their code in here
        code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
        if _USERS_FAULT & {type(error).__name__, code}:
            return DataError(f"{place}: it is missing or may not be read ({detail}). Check the source and credentials.")
        return InfrastructureError(f"{place}: {type(error).__name__}: {detail}")


class ShardCache:
    """Makes files of a dataset local, for all processes of a node.

    Args:
        source: Where the files come from.
        directory: Of this version of this dataset only; shared by the processes of the node.
    """

    def __init__(self, source: FileSource, directory: Path) -> None:
        self._source = source
        self.directory = directory

    def local(self, raw: FileInfo, zipped: FileInfo | None = None, compression: str | None = None) -> Path:
        """The local path of a shard, downloaded and unpacked if need be.

        Raises:
            DataError: The shard is missing or damaged.
            InfrastructureError: It could not be downloaded for another reason.
        """
        in_place = self._in_place(raw)
        if in_place is not None:
            return in_place
        path = self.directory / raw.basename
        if _has_size(path, raw):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(path.with_name(f".{path.name}.lock")):
            if not _has_size(path, raw):
                self._source.retry(f"shard {raw.basename}", lambda: self._fetch(path, raw, zipped, compression))
        return path

    def discard(self, raw: FileInfo) -> bool:
        """Drop a damaged shard, so that ``local`` downloads it again; False if it was read in place."""
        if self._in_place(raw) is not None:
            return False
        path = self.directory / raw.basename
        with exclusive_lock(path.with_name(f".{path.name}.lock")):
            if path.exists() and damage(path.read_bytes(), raw):  # or else another process replaced it already
                path.unlink()
        return True

    def _in_place(self, raw: FileInfo) -> Path | None:
        if self._source.folder is None:
            return None
        path = self._source.folder / raw.basename
        return path if path.exists() else None

    def _fetch(self, path: Path, raw: FileInfo, zipped: FileInfo | None, compression: str | None) -> None:
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while it held the lock
        partial.mkdir()
        stored = zipped or raw
        downloaded = partial / Path(stored.basename).name
        self._source.download(stored.basename, downloaded)
        data = downloaded.read_bytes()
        _check(data, stored)
        if zipped is not None:
            data = decompress(compression, data)
            _check(data, raw)
            downloaded = partial / "raw"
            downloaded.write_bytes(data)
        downloaded.replace(path)
        shutil.rmtree(partial)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes and threads; the kernel releases it when its holder dies."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def damage(data: bytes | memoryview, info: FileInfo) -> str:
    """What is wrong with a file's content according to the index; empty if nothing is."""
    if len(data) != info.bytes:
        return f"{info.basename} has {len(data)} bytes, the index says {info.bytes}"
    for algorithm in sorted(info.hashes, reverse=True):  # the xxh family, the fastest, comes first
        if is_hash(algorithm):
            actual = get_hash(algorithm, data)  # type: ignore[arg-type]
            wrong = actual != info.hashes[algorithm]
            return f"the {algorithm} of {info.basename} is {actual}, not {info.hashes[algorithm]}" if wrong else ""
    return ""


def _check(data: bytes, info: FileInfo) -> None:
    problem = damage(data, info)
    if problem:
        raise DamagedFileError(problem)


def _has_size(path: Path, info: FileInfo) -> bool:
    try:
        return path.stat().st_size == info.bytes
    except FileNotFoundError:
        return False


def _streaming_url(source: str) -> str:
    """The source as MosaicML streaming writes it."""
    scheme, separator, rest = source.partition("://")
    match scheme if separator else "":
        case "" | "s3" | "gs":
            return source
        case "hf":
            return source if rest.startswith("datasets/") else f"hf://datasets/{rest}"
        case "az":
            account = os.environ.get("AZURE_ACCOUNT_NAME")
            if not account:
                raise JobError(f"{source} needs the storage account's name in the environment as AZURE_ACCOUNT_NAME")
            return f"azure://{account}.blob.core.windows.net/{rest}"
        case _:
            raise JobError(f"unknown scheme of the dataset {source}; use s3://, gs://, az://, hf:// or a path")
