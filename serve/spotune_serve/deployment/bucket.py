"""Models in buckets with the S3 protocol: each process downloads what it needs into the cache of its node."""

from __future__ import annotations

import hashlib
import os
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, TypeVar

from spotune.errors import InfrastructureError, JobError
from spotune_serve.file_lock import locked

_CONFIG: Final = "config.json"
_PAUSES_SECONDS: Final = (0.5, 1.0, 2.0)
"""Between the attempts to read a bucket, beside the retries of boto3, which do not cover the body of an object."""
_READ_BYTES: Final = 1 << 20
_TIMEOUT_SECONDS: Final = 30
_THREADS: Final = 8
_MD5: Final = re.compile(r"[0-9a-f]{32}")
_REFUSALS: Final = frozenset({301, 400, 401, 403, 404, 405})
"""HTTP statuses of a request that fails again: it names the wrong bucket, prefix or region, or has no access."""
_TRANSIENT: Final = frozenset({"ExpiredToken", "RequestTimeout", "RequestTimeTooSkewed"})
"""Error codes with such a status that go away by themselves."""
_REFUSED: Final = (
    "Check bucket and prefix in spec.model.source. Give the pods access: by serviceAccountName (workload identity), or "
    "by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in podTemplate and gateway.podTemplate. A store that is not AWS "
    "needs AWS_ENDPOINT_URL."
)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class BucketModel:
    """A model in a bucket.

    Attributes:
        bucket: name of the bucket.
        prefix: the part of the keys before the names of the files, without a slash at its end.
    """

    bucket: str
    prefix: str

    @property
    def name(self) -> str:
        """The last part of the prefix."""
        return self.prefix.rpartition("/")[2]

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True)
class _StoredFile:
    """A file of a model: its name, its size in bytes, and its ETag without quotes."""

    name: str
    size: int
    etag: str


class _IncompleteFileError(Exception):
    """A download ended early, or has other bytes than the object."""


class _ChangedFileError(Exception):
    """An object was replaced after the prefix was listed."""


def bucket_model_folder(model: BucketModel, patterns: Sequence[str], ignored: Sequence[str]) -> Path:
    """The folder with the files of a model on this machine. They are downloaded first if they are not there.

    The name of the folder has a digest of the files' ETags: other files in the bucket get a folder of their own. Other
    processes see the folder when it is complete. Files that an ended process downloaded are kept.

    Args:
        model: the model.
        patterns: shell patterns of the names of files that are needed. Folders below the prefix are not read.
        ignored: shell patterns of names that are left out.

    Raises:
        JobError: there is no model at the prefix, or access is denied.
        InfrastructureError: the store did not answer, a file was replaced meanwhile, or the disk cannot be written.
    """
    store = _Bucket(model)
    listed = _with_retries(model, store.list_files)
    if not listed:
        raise JobError(f"there is no file at {model}/. Check bucket and prefix in spec.model.source.")
    if _CONFIG not in {file.name for file in listed}:
        raise JobError(
            f"{model}/ has no {_CONFIG}, so it is not a transformers model. Set spec.model.source to the folder that "
            "has it: for a job's output, the prefix ends with export."
        )
    chosen = [
        file
        for file in listed
        if any(fnmatch(file.name, one) for one in patterns) and not any(fnmatch(file.name, one) for one in ignored)
    ]
    folder = _cache() / f"{model.name}-{_digest(model, chosen)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                partial = folder.with_name(f".{folder.name}.incomplete")
                partial.mkdir(exist_ok=True)
                with ThreadPoolExecutor(_THREADS) as threads:
                    list(threads.map(lambda file: _complete(model, store, file, partial), chosen))
                partial.rename(folder)
    except OSError as error:
        raise InfrastructureError(
            f"{model} cannot be written to {folder.parent} ({error}). Set SPOTUNE_CACHE to a folder with more room."
        ) from error
    return folder


class _Bucket:
    """Reads the files of a model. Without credentials, requests are not signed, as public buckets allow."""

    def __init__(self, model: BucketModel) -> None:
        from boto3.session import Session
        from botocore import UNSIGNED
        from botocore.config import Config

        self._model = model
        session = Session()
        is_signed = session.get_credentials() is not None
        config = Config(
            connect_timeout=_TIMEOUT_SECONDS,
            read_timeout=_TIMEOUT_SECONDS,
            retries={"mode": "standard"},
            signature_version=None if is_signed else UNSIGNED,
        )
        # Without $S3_ENDPOINT_URL, which the trainer reads, boto3 takes $AWS_ENDPOINT_URL.
        self._client = session.client("s3", config=config, endpoint_url=os.environ.get("S3_ENDPOINT_URL"))

    def list_files(self) -> list[_StoredFile]:
        """The files at the prefix, without those of its folders, sorted by name."""
        start = f"{self._model.prefix}/"
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._model.bucket, Prefix=start, Delimiter="/"
        )
        found = [each for page in pages for each in page.get("Contents", ())]
        files = [_StoredFile(each["Key"][len(start) :], each["Size"], each["ETag"].strip('"')) for each in found]
        return sorted((file for file in files if file.name), key=lambda file: file.name)

    def download(self, file: _StoredFile, target: Path) -> None:
        """Write a file, and compare its size and, where its ETag is its MD5, its bytes."""
        answer = self._client.get_object(
            Bucket=self._model.bucket, Key=f"{self._model.prefix}/{file.name}", IfMatch=f'"{file.etag}"'
        )
        with answer["Body"] as body, target.open("wb") as stream:
            if answer["ETag"].strip('"') != file.etag:  # some stores ignore the condition
                raise _ChangedFileError
            md5, size = hashlib.md5(usedforsecurity=False), 0
            while block := body.read(_READ_BYTES):
                stream.write(block)
                md5.update(block)
                size += len(block)
        if size != file.size:
            raise _IncompleteFileError(f"{file.name}: {size:,} of {file.size:,} bytes were sent")
        if self._has_md5(file, answer) and md5.hexdigest() != file.etag:
            raise _IncompleteFileError(f"{file.name}: the bytes have the MD5 {md5.hexdigest()}, not {file.etag}")

    def _has_md5(self, file: _StoredFile, answer: Any) -> bool:
        """Whether the ETag is the MD5 of the bytes: not for parts, keys of KMS or of clients, or directory buckets."""
        by_key = str(answer.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in answer
        return bool(_MD5.fullmatch(file.etag)) and not by_key and not self._model.bucket.endswith("--x-s3")


def _complete(model: BucketModel, store: _Bucket, file: _StoredFile, folder: Path) -> None:
    """Download a file into the folder, unless it is there: only complete files have their name."""
    if (folder / file.name).exists():
        return
    target = folder / f"{file.name}.incomplete"
    _with_retries(model, lambda: store.download(file, target))
    target.rename(folder / file.name)


def _with_retries(model: BucketModel, attempt: Callable[[], _Result]) -> _Result:
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from urllib3.exceptions import HTTPError

    for pause in (*_PAUSES_SECONDS, None):
        try:
            return attempt()
        except _ChangedFileError as error:
            raise _changed(model) from error
        except (BotoCoreError, ClientError, HTTPClientError, HTTPError, _IncompleteFileError) as error:
            reason = textwrap.shorten(str(error) or type(error).__name__, width=300, placeholder=" ...")
            status, code = _answer(error)
            if code in {"PreconditionFailed", "412"}:
                raise _changed(model) from error
            if status in _REFUSALS and code not in _TRANSIENT:
                raise JobError(f"{model} cannot be downloaded: {reason}. {_REFUSED}") from error
            if pause is None:
                raise InfrastructureError(
                    f"{model} cannot be downloaded: {reason}. Check that the store can be reached from here; a store "
                    "that is not AWS needs AWS_ENDPOINT_URL."
                ) from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _answer(error: Exception) -> tuple[int, str]:
    """HTTP status and error code of a store's answer; (0, "") without one."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return 0, ""
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(response.get("Error", {}).get("Code", ""))


def _changed(model: BucketModel) -> InfrastructureError:
    return InfrastructureError(
        f"{model} was replaced while it was downloaded. Write each model to a prefix of its own."
    )


def _digest(model: BucketModel, files: Sequence[_StoredFile]) -> str:
    content = "\n".join([str(model), *(f"{file.name} {file.size} {file.etag}" for file in files)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _cache() -> Path:
    return Path(os.environ.get("SPOTUNE_CACHE") or Path.home() / ".cache" / "spotune") / "buckets"
