"""Node-local cache of a dataset's shards: each shard is downloaded once for all processes of the node.

A download goes to a temporary file, is checked against the index, and is then renamed, so a cached shard is always
complete. A file lock per shard prevents two processes from downloading it at the same time. The kernel releases the
lock when its process dies, so a killed process blocks no other. The cache survives restarts.

MosaicML streaming's downloaders do the transfers (s3, gs, az, hf), those of Google and Azure with the clients that read
raw rows. Local folders are read in place.
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
from streaming.base.storage import AzureDownloader, CloudDownloader, GCSDownloader

from spotune.errors import DataError, InfrastructureError, JobError, SpotuneError
from spotune_trainer.data.stores.azure import azure_client
from spotune_trainer.data.stores.failures import detail, is_for_the_user
from spotune_trainer.data.stores.google import google_client, google_keys

Result = TypeVar("Result")

DOWNLOAD_ATTEMPTS = 4
FIRST_RETRY_DELAY_SECONDS = 0.5  # doubles with every further attempt
STALLED_DOWNLOAD_SECONDS = 60.0  # a download without progress for this long fails


class DamagedFileError(DataError):
    """A stored file does not match the index of its dataset."""


class FileSource:
    """The location of a dataset's files: a folder, or a URL with scheme ``s3``, ``gs``, ``az`` or ``hf``.

    Args:
        source: As written in the job, with relative paths already made absolute.

    Attributes:
        source: The location, without a trailing slash.
        folder: The local folder; None for a URL.

    Raises:
        JobError: The scheme is unknown, or an environment variable that it needs is not set.
    """

    def __init__(self, source: str) -> None:
        self.source = source.rstrip("/")
        self.folder = None if "://" in source else Path(source)
        self._url = _streaming_url(self.source)
        self._closing = threading.Event()
        self._downloader = _downloader(self._url)

    def close(self) -> None:
        """Stop retrying: other threads that wait between attempts make their last attempt at once."""
        self._closing.set()

    def download(self, basename: str, target: Path) -> None:
        """Copy one file of the dataset to ``target``, which must not exist.

        Makes one attempt and raises the storage client's own errors; see `retry`.
        """
        self._downloader.download(f"{self._url}/{basename}", str(target), STALLED_DOWNLOAD_SECONDS)

    def retry(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Call ``attempt`` up to four times with exponential backoff, and return its result.

        Args:
            what: The file, for the error message.
            attempt: Called without arguments.

        Raises:
            DataError: In the last attempt the file was missing, damaged, or access was denied.
            InfrastructureError: The last attempt failed for another reason.
        """
        delay = FIRST_RETRY_DELAY_SECONDS
        for _ in range(DOWNLOAD_ATTEMPTS - 1):
            try:
                return attempt()
            except Exception:  # noqa: BLE001 - storage clients share no base class; the last error is raised
                if self._closing.wait(delay):
                    break
                delay *= 2
        try:
            return attempt()
        except Exception as error:
            raise self._as_spotune_error(what, error) from error

    def _as_spotune_error(self, what: str, error: Exception) -> SpotuneError:
        place = f"{what} of {self.source} could not be read in {DOWNLOAD_ATTEMPTS} attempts"
        if isinstance(error, DamagedFileError):
            return DataError(f"{place}: {error}. Upload it again, or write the dataset again with `spotune shard`.")
        if is_for_the_user(error):
            return DataError(
                f"{place}: it is missing or access is denied ({detail(error)}). Check the source and credentials."
            )
        return InfrastructureError(f"{place}: {type(error).__name__}: {detail(error)}")


class ShardCache:
    """Gives local paths of a dataset's shards, and downloads those that are missing.

    Args:
        source: Location of the dataset.
        directory: Cache folder of this version of this dataset only; shared by all processes of the node.
    """

    def __init__(self, source: FileSource, directory: Path) -> None:
        self._source = source
        self.directory = directory

    def fetch(self, raw: FileInfo, zipped: FileInfo | None = None, compression: str | None = None) -> Path:
        """The local path of a shard. Downloads and decompresses it if necessary.

        Args:
            raw: The index's entry for the uncompressed file.
            zipped: The index's entry for the compressed file, if there is one.
            compression: How it is compressed, such as ``zstd``.

        Raises:
            DataError: The shard is missing or damaged, or access is denied.
            InfrastructureError: The download failed for another reason.
        """
        in_place = self._path_in_place(raw)
        if in_place is not None:
            return in_place
        path = self.directory / raw.basename
        if _has_size(path, raw):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(path.with_name(f".{path.name}.lock")):
            if not _has_size(path, raw):
                self._source.retry(f"shard {raw.basename}", lambda: self._download(path, raw, zipped, compression))
        return path

    def discard(self, raw: FileInfo) -> bool:
        """Delete a damaged shard from the cache, so that `fetch` downloads it again.

        Returns:
            False if the shard is read in place, where nothing is deleted.
        """
        if self._path_in_place(raw) is not None:
            return False
        path = self.directory / raw.basename
        with exclusive_lock(path.with_name(f".{path.name}.lock")):
            if path.exists() and find_damage(path.read_bytes(), raw):  # unless another process has replaced it already
                path.unlink()
        return True

    def _path_in_place(self, raw: FileInfo) -> Path | None:
        if self._source.folder is None:
            return None
        path = self._source.folder / raw.basename
        return path if path.exists() else None

    def _download(self, path: Path, raw: FileInfo, zipped: FileInfo | None, compression: str | None) -> None:
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed while downloading
        partial.mkdir()
        stored = zipped or raw
        downloaded = partial / Path(stored.basename).name
        self._source.download(stored.basename, downloaded)
        data = downloaded.read_bytes()
        _verify(data, stored)
        if zipped is not None:
            data = decompress(compression, data)
            _verify(data, raw)
            downloaded = partial / "raw"
            downloaded.write_bytes(data)
        downloaded.replace(path)
        shutil.rmtree(partial)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold a lock that excludes other processes and threads. The kernel releases it when the holder dies."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def find_damage(data: bytes | memoryview, info: FileInfo) -> str:
    """How a file's content differs from its index entry, by size and hash; empty if it matches."""
    if len(data) != info.bytes:
        return f"{info.basename} has {len(data)} bytes, but the index lists {info.bytes}"
    for algorithm in sorted(info.hashes, reverse=True):  # xxh, the fastest family, sorts first
        if is_hash(algorithm):
            expected, actual = info.hashes[algorithm], get_hash(algorithm, data)  # type: ignore[arg-type]
            return f"the {algorithm} of {info.basename} is {actual}, not {expected}" if actual != expected else ""
    return ""


def _verify(data: bytes, info: FileInfo) -> None:
    problem = find_damage(data, info)
    if problem:
        raise DamagedFileError(problem)


def _has_size(path: Path, info: FileInfo) -> bool:
    try:
        return path.stat().st_size == info.bytes
    except FileNotFoundError:
        return False


def _streaming_url(source: str) -> str:
    """The source in the URL syntax of MosaicML streaming."""
    scheme, separator, path = source.partition("://")
    match scheme if separator else "":
        case "" | "s3" | "gs":
            return source
        case "hf":
            return source if path.startswith("datasets/") else f"hf://datasets/{path}"
        case "az":
            return f"azure://account/{path}"  # the account is that of the client
        case _:
            raise JobError(f"the dataset {source} has an unknown scheme; use s3://, gs://, az://, hf:// or a path")


def _downloader(url: str) -> CloudDownloader:
    scheme = url.partition("://")[0]
    downloaders: dict[str, Callable[[], CloudDownloader]] = {"azure": _AzureDownloader, "gs": _GoogleDownloader}
    return downloaders[scheme]() if scheme in downloaders else CloudDownloader.get(url)


class _AzureDownloader(AzureDownloader):
    """Streaming's own client knows no other endpoint than the one of Azure's public cloud."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._azure_client = azure_client()


class _GoogleDownloader(GCSDownloader):
    """Streaming's own client knows no other endpoint than Google's."""

    def _create_gcs_client(self) -> None:
        from boto3.session import Session

        keys = google_keys()
        self._gcs_client = google_client() if keys is None else Session().client("s3", **keys)
