"""Client of one folder in a bucket: S3 and stores with its protocol, Google Cloud Storage, Azure Blob Storage.

All three have conditional writes, which fence writers off: a name is created once, whoever else tries it. The client is
the `object_store` library of Rust. It retries requests for some seconds; then a `BucketError` says why.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from spotune.errors import JobError

SCHEMES: Final = ("s3", "gs", "az")
_CHUNK_BYTES: Final = 8 << 20
"""Size of the parts of an upload."""
_CONCURRENCY: Final = 8
"""Requests of one process at a time, for a file of many parts or for many files."""
_CLIENT: Final[dict[str, Any]] = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
_RETRIES: Final[dict[str, Any]] = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 2},
}


class BucketError(OSError):
    """The bucket cannot be reached, or refuses a request. An `OSError`, as of a volume that is unavailable."""


class Bucket:
    """The objects below a URL, by names relative to it.

    Args:
        url: such as ``s3://bucket/prefix``.

    Attributes:
        url: the same, without a slash at the end.
        requests: number of requests so far, by kind. A request of many parts counts once for each.

    Raises:
        JobError: no bucket is named, or the environment has no account for it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.requests: Counter[str] = Counter()
        self._store = _open_store(self.url)

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if there is none."""
        import obstore

        with self._request("get", name):
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

    def read_start(self, name: str, length: int) -> bytes:
        """The first bytes of an object, at most `length`."""
        import obstore

        with self._request("get", name):
            return bytes(obstore.get_range(self._store, name, start=0, length=length))

    def read_from(self, name: str, start: int) -> bytes:
        """The bytes of an object from `start` on. There must be at least one."""
        import obstore

        with self._request("get", name):
            return bytes(obstore.get(self._store, name, options={"range": {"offset": start}}).bytes())

    def write(self, name: str, content: bytes) -> None:
        """Write an object, or replace it."""
        import obstore

        with self._request("put", name):
            obstore.put(self._store, name, content, use_multipart=False)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one of this name. Of all who try, one succeeds.

        Returns:
            Whether the object has this content now: if the answer to a successful request is lost, the same content is
            found by the next one. Content that two may write has to differ.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._request("put", name):
            try:
                obstore.put(self._store, name, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return self.read(name) == content
        return True

    def list(self, folder: str = "", after: str = "") -> dict[str, int]:
        """Size in bytes of all objects in a folder and in those below it, by name in ascending order.

        Args:
            folder: its name; empty: everything.
            after: leave out names up to this one.
        """
        import obstore

        with self._request("list", folder):
            pages = list(obstore.list(self._store, folder or None, offset=after or None))
        self.requests["list"] += max(0, len(pages) - 1)
        # Some servers ignore where to start.
        return dict(sorted((each["path"], each["size"]) for page in pages for each in page if each["path"] > after))

    def upload(self, name: str, path: Path, report: Callable[[int], None] = lambda _count: None) -> None:
        """Copy a file to an object, which appears when it is complete.

        Args:
            name: of the object.
            path: of the file.
            report: called with the number of bytes of each part before it is sent; what it raises ends the upload.
        """
        import obstore

        size = path.stat().st_size
        if size <= _CHUNK_BYTES:
            report(size)
            self.write(name, path.read_bytes())
            return
        with self._request("put", name):
            obstore.put(self._store, name, _chunks(path, report), chunk_size=_CHUNK_BYTES, max_concurrency=_CONCURRENCY)
        self.requests["put"] += 1 + -(-size // _CHUNK_BYTES)

    def download(self, name: str, path: Path) -> None:
        """Copy an object to a file, which appears when it is complete.

        Raises:
            FileNotFoundError: there is no such object.
        """
        import obstore

        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream, self._request("get", name):
                for chunk in obstore.get(self._store, name).stream(min_chunk_size=_CHUNK_BYTES):
                    stream.write(chunk)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def download_all(self, files: Iterable[tuple[str, Path]], heartbeat: Callable[[], None] = lambda: None) -> None:
        """As `download`, for many objects at a time; calls `heartbeat` after each of them."""
        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="download") as threads:
            for done in [threads.submit(self.download, name, path) for name, path in files]:
                done.result()
                heartbeat()

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        import obstore

        listed = list(names)
        if not listed:
            return
        with self._request("delete", listed[0]):
            try:
                obstore.delete(self._store, listed)
            except FileNotFoundError:  # Google's and Azure's stores delete one after the other
                for name in listed:
                    _delete_if_there(self._store, name)

    @contextmanager
    def _request(self, kind: str, name: str) -> Iterator[None]:
        """Count a request, and raise its failure as a `BucketError`."""
        from obstore.exceptions import BaseError

        self.requests[kind] += 1
        try:
            yield
        except BaseError as error:
            raise BucketError(f"{self.url}/{name} cannot be {_VERBS[kind]}: {_reason(error)}") from error
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.url}/{name} does not exist") from error


_VERBS: Final = {"get": "read", "put": "written", "list": "listed", "delete": "deleted"}


@cache
def open_bucket(url: str) -> Bucket:
    """The client of a URL; one for each process, which shares its connections."""
    return Bucket(url)


def _delete_if_there(store: Any, name: str) -> None:
    import obstore

    with suppress(FileNotFoundError):
        obstore.delete(store, name)


def _chunks(path: Path, report: Callable[[int], None]) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            report(len(chunk))
            yield chunk


def _reason(error: Exception) -> str:
    """The error in one line: without the client's debug output, and without the body of the response."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = str(error).partition("\n")[0].partition(": <?xml")[0].strip()
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return f"access is denied. Check the credentials in the environment, and their permissions ({text})"
    return text or type(error).__name__


def _open_store(url: str) -> Any:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.netloc:
        known = ", ".join(f"{name}://bucket/prefix" for name in SCHEMES)
        raise JobError(f"storage.bucket: {url} is not the URL of a bucket; use {known}")
    return _STORES[parts.scheme](parts.netloc, parts.path.strip("/") or None)


def _s3(bucket: str, prefix: str | None) -> Any:
    """The variables are those of boto3; `$S3_ENDPOINT_URL` is the server, unless the bucket is at AWS."""
    from obstore.store import S3Store

    config: Any = {}
    endpoint = os.environ.get("S3_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        config |= {"endpoint": endpoint, "region": os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"}
    return S3Store(
        bucket,
        prefix=prefix,
        config=config,
        client_options=_client_options(endpoint),
        retry_config=_retries(),
        credential_provider=None if os.environ.get("AWS_ACCESS_KEY_ID") else _boto3_credentials(),
    )


def _boto3_credentials() -> Any:
    """Profiles, workload identities and instance roles, as boto3 finds them."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except ValueError as error:
        raise JobError(
            "storage.bucket: there are no credentials for s3://. Set AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, and "
            "S3_ENDPOINT_URL unless the bucket is at AWS"
        ) from error


def _google(bucket: str, prefix: str | None) -> Any:
    """Google's default credentials; `$STORAGE_EMULATOR_HOST` is its own variable for an endpoint."""
    from obstore.store import GCSStore

    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    config: Any = {}
    if emulator:
        key = {
            "gcs_base_url": emulator,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        config["service_account_key"] = json.dumps(key)
    elif "GCS_KEY" in os.environ and "GOOGLE_APPLICATION_CREDENTIALS" not in os.environ:
        raise JobError(
            "storage.bucket: gs:// as storage needs GOOGLE_APPLICATION_CREDENTIALS or a workload identity. GCS_KEY and "
            "GCS_SECRET have no conditional writes"
        )
    return GCSStore(
        bucket, prefix=prefix, config=config, client_options=_client_options(emulator), retry_config=_retries()
    )


def _azure(container: str, prefix: str | None) -> Any:
    """The variables are those of `azure_client` of `data.stores`."""
    from obstore.store import AzureStore

    config: Any = {}
    fields = _connection_string()
    account = fields.get("AccountName") or os.environ.get("AZURE_ACCOUNT_NAME")
    if not account:
        raise JobError(
            "storage.bucket: az:// needs the environment variable AZURE_ACCOUNT_NAME: set it to the account's name, or "
            "set AZURE_STORAGE_CONNECTION_STRING"
        )
    config["account_name"] = account
    key = fields.get("AccountKey") or os.environ.get("AZURE_ACCOUNT_ACCESS_KEY")
    if key:
        config["account_key"] = key
    endpoint = fields.get("BlobEndpoint") or os.environ.get("AZURE_STORAGE_ENDPOINT")
    if endpoint:
        config["endpoint"] = endpoint.rstrip("/")
    return AzureStore(
        container, prefix=prefix, config=config, client_options=_client_options(endpoint), retry_config=_retries()
    )


def _connection_string() -> dict[str, str]:
    """The fields of `$AZURE_STORAGE_CONNECTION_STRING`; none without it."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    return {name: value for name, _, value in (field.partition("=") for field in text.split(";")) if value}


def _client_options(endpoint: str | None) -> Any:
    return {**_CLIENT, "allow_http": bool(endpoint and endpoint.startswith("http://"))}


def _retries() -> Any:
    return _RETRIES


_STORES: Final[dict[str, Callable[[str, str | None], Any]]] = {"s3": _s3, "gs": _google, "az": _azure}
