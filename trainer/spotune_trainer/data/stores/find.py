"""Finds files in stores by URL, folder and pattern, and copies them to this node while they are read."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Final, TypeVar

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.data.stores.failures import detail, is_for_the_user
from spotune_trainer.data.stores.hub import parse_dataset
from spotune_trainer.data.stores.hub_splits import CARD_METADATA, choose_split
from spotune_trainer.data.stores.patterns import WILDCARD, compile_pattern
from spotune_trainer.data.stores.stored_file import ChangedFileError, Store, StoredFile

_Result = TypeVar("_Result")

SCHEMES: Final = ("s3", "gs", "az", "hf", "http", "https")
PAUSES_SECONDS: Final = (0.5, 1.0, 2.0)
"""Between the attempts of a request."""
_ONE_FILE: Final = "name one file: a web server lists no folders"
_REMEDIES: Final = {
    "s3": "set AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, and S3_ENDPOINT_URL unless the bucket is at AWS",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GCS_KEY with GCS_SECRET",
    "az": "set AZURE_ACCOUNT_NAME, and AZURE_ACCOUNT_ACCESS_KEY or a login; or AZURE_STORAGE_CONNECTION_STRING",
    "hf": "set HF_TOKEN for a dataset that is private or gated",
    "http": _ONE_FILE,
    "https": _ONE_FILE,
}


class IncompleteCopyError(Exception):
    """A download ended before the end of the file."""


def find_stored_files(
    source: str, config: str = "", split: str = "", is_rows: Callable[[str], bool] = lambda _name: True
) -> list[StoredFile]:
    """The file that a URL names, or those below a folder or of a pattern such as ``s3://bucket/rows/*.jsonl``.

    Args:
        source: The URL.
        config: Configuration of a dataset on the Hugging Face Hub; empty: the default one.
        split: Split of a dataset on the Hub, or of a folder in it; empty: the only one.
        is_rows: Whether the format of a file name is one of rows. Others belong to no split.

    Returns:
        Sorted by URL, without files and folders whose name starts with a dot; a file that is named itself always. The
        files of a split have the order of `choose_split`.

    Raises:
        JobError: There is none, access is denied, or the scheme is unknown. Or a dataset has several splits, and none
            was asked for.
        InfrastructureError: The store did not answer.
    """
    scheme, bucket, key = split_url(source)
    if scheme.startswith("http"):
        source = source.partition("?")[0]  # for messages: a query may hold a signature
    card = (CARD_METADATA,) if scheme == "hf" and not key else ()
    found = with_retries(source, lambda: _list(open_store(scheme), bucket, key, hidden_too=card))
    names_files = WILDCARD.search(key) is not None or [file.key for file in found] == [key]
    if scheme == "hf" and found and not names_files:
        return choose_split(source, key, found, config, split, is_rows, partial(_read_text, source))
    if found and (config or split):
        raise JobError(
            f"{source} names files itself: remove {'split' if split else 'config'}, or name the dataset or a folder in "
            "it: hf://datasets/owner/name"
        )
    if not found:
        what = "no file matches" if WILDCARD.search(key) else "there is no file or folder at"
        raise JobError(f"{what} {source}: check the name with the tool of the store")
    return found


@contextmanager
def local_copy(file: StoredFile, folder: Path) -> Iterator[Path]:
    """A copy of the file on this node, deleted on exit. Copies of killed processes are deleted by the next call.

    Args:
        file: Read in the version that was found.
        folder: For all copies; shared by the processes of a node.

    Raises:
        JobError: The file is missing or access is denied.
        InfrastructureError: It was replaced meanwhile, the disk is too small, or the download failed.
    """
    scheme = split_url(file.url)[0]
    with _own_folder(folder) as own:
        free = shutil.disk_usage(own).free
        if free < file.size:
            raise InfrastructureError(
                f"{file.url} has {file.size:,} bytes, but {folder} has room for {free:,}: use fewer processes, or set "
                "SPOTUNE_CACHE to a folder on a larger disk"
            )
        target = own / Path(file.url).name

        def attempt() -> None:
            target.unlink(missing_ok=True)
            open_store(scheme).download(file, target)
            if target.stat().st_size != file.size:
                raise IncompleteCopyError(f"{target.stat().st_size:,} of {file.size:,} bytes were sent")

        with_retries(file.url, attempt)
        yield target


def _read_text(source: str, file: StoredFile) -> str:
    """The content of a small file in the Hub's repository of `source`."""

    def attempt() -> str:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "content"
            open_store("hf").download(file, target)
            return target.read_text(encoding="utf-8")

    return with_retries(source, attempt)


def split_url(source: str) -> tuple[str, str, str]:
    """Scheme, bucket and key of a URL.

    Raises:
        JobError: The scheme is unknown, or no dataset of the Hub is named.
    """
    scheme, _, place = source.partition("://")
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise JobError(f"raw data at {source} has an unknown scheme; use {known} or a path")
    if scheme != "hf":
        bucket, _, key = place.partition("/")
        return scheme, bucket, key
    return scheme, *parse_dataset(source)


@cache
def open_store(scheme: str) -> Store:
    """The client for a scheme; one for each process, because connections cannot be shared."""
    from spotune_trainer.data.stores.azure import AzureStore
    from spotune_trainer.data.stores.google import open_google_store
    from spotune_trainer.data.stores.hub import HubStore
    from spotune_trainer.data.stores.s3 import S3Store
    from spotune_trainer.data.stores.web import WebStore

    stores: dict[str, Callable[[], Store]] = {
        "s3": S3Store,
        "gs": open_google_store,
        "az": AzureStore,
        "hf": HubStore,
    }
    return stores[scheme]() if scheme in stores else WebStore(scheme)


def _list(store: Store, bucket: str, key: str, hidden_too: Collection[str]) -> list[StoredFile]:
    first = next(iter(store.list_files(bucket, key)), None)  # stores list in order: the key itself comes first
    if first is None and not WILDCARD.search(key):
        return []
    if first is not None and first.key == key and not key.endswith("/"):
        return [first]
    wildcard = WILDCARD.search(key)
    prefix = key[: wildcard.start()] if wildcard else f"{key.rstrip('/')}/" if key else ""
    pattern = compile_pattern(key if wildcard else "**")
    files = [
        file
        for file in store.list_files(bucket, prefix)
        if pattern.fullmatch(file.key)
        and not file.key.endswith("/")
        and (file.key in hidden_too or not _is_hidden(file.key[len(prefix) :]))
    ]
    return sorted(files, key=lambda file: file.url)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def with_retries(url: str, attempt: Callable[[], _Result], action: str = "read") -> _Result:
    """Call ``attempt`` up to four times, with pauses, and return its result.

    Args:
        url: What is read or written, for messages.
        attempt: Called without arguments.
        action: ``read`` or ``written``, for messages.

    Raises:
        JobError: The file is missing or access is denied.
        InfrastructureError: It was replaced while it was read, or the last attempt failed.
    """
    for pause in (*PAUSES_SECONDS, None):
        try:
            return attempt()
        except JobError:
            raise
        except ChangedFileError as error:
            raise InfrastructureError(f"{url} was replaced while it was read: run it again") from error
        except Exception as error:  # the clients of the stores have no common base class
            if is_for_the_user(error):
                raise JobError(_refused(url, error)) from error
            if pause is None:
                tried = f"{len(PAUSES_SECONDS) + 1} attempts"
                raise InfrastructureError(
                    f"{url} could not be {action} in {tried} ({type(error).__name__}: {detail(error)}): run it again"
                ) from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _refused(url: str, error: Exception) -> str:
    scheme = url.partition("://")[0]
    return f"{url} is missing, or access is denied ({detail(error)}): check the name, and {_REMEDIES[scheme]}"


@contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    """A new folder for one copy. It is locked while it is used, so `_sweep` knows which ones were abandoned."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _sweep(folder)
        own = Path(tempfile.mkdtemp(dir=folder))
        held = os.open(own, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os.close(held)


def _sweep(folder: Path) -> None:
    for other in (path for path in folder.iterdir() if path.is_dir()):
        try:
            descriptor = os.open(other, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # its process has just deleted it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(descriptor)
