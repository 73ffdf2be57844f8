"""Reads one small object of an object store without MosaicML streaming, whose import would load torch.

The clients and their environment variables are the ones that streaming uses. So the workers can read what this module
can read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.data.stores.azure import azure_client
from spotune_trainer.data.stores.google import google_client, google_keys

_TIMEOUT_SECONDS = 10

_Reader = Callable[[str, str, int], bytes]
"""Takes bucket (or container, or owner of a repository), key, and the maximum number of bytes to read."""


def read_object(url: str, max_bytes: int, field: str) -> bytes:
    """The first bytes of an object at an `s3://`, `gs://`, `az://` or `hf://` URL.

    Args:
        url: of the object.
        max_bytes: limit of what is read.
        field: of the job that names the object, for messages.

    Raises:
        JobError: the URL's scheme is not supported.
        InfrastructureError: the object cannot be read.
    """
    scheme, _, location = url.partition("://")
    bucket, _, key = location.partition("/")
    if scheme not in _READERS:
        raise JobError(
            f"{field}: unknown scheme of {url}; use {', '.join(f'{name}://' for name in _READERS)} or a path"
        )
    try:
        return _READERS[scheme](bucket, key, max_bytes)
    except Exception as error:  # the clients of the four stores have no common base class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InfrastructureError(
            f"{field}: {url} cannot be read ({reason}): check that it exists, the credentials of the store "
            "(dataset.credentials, workers.serviceAccountName), and that the cluster can reach it"
        ) from error


def _from_s3(bucket: str, key: str, max_bytes: int) -> bytes:
    from botocore import UNSIGNED
    from botocore.exceptions import NoCredentialsError

    endpoint = os.environ.get("S3_ENDPOINT_URL")
    try:
        return _get_object(bucket, key, max_bytes, endpoint_url=endpoint)
    except NoCredentialsError:  # a public bucket needs none
        return _get_object(bucket, key, max_bytes, UNSIGNED, endpoint_url=endpoint)


def _from_google(bucket: str, key: str, max_bytes: int) -> bytes:
    keys = google_keys()
    if keys is not None:
        return _get_object(bucket, key, max_bytes, **keys)
    blob = google_client().bucket(bucket).blob(key)
    return bytes(blob.download_as_bytes(end=max_bytes - 1, timeout=_TIMEOUT_SECONDS, retry=None))


def _from_azure(container: str, name: str, max_bytes: int) -> bytes:
    timeouts: dict[str, Any] = {
        "connection_timeout": _TIMEOUT_SECONDS,
        "read_timeout": _TIMEOUT_SECONDS,
        "retry_total": 1,
    }
    with azure_client(**timeouts) as service:
        blob = service.get_blob_client(container, name)
        return bytes(blob.download_blob(offset=0, length=max_bytes).readall())


def _from_hub(owner: str, path: str, max_bytes: int) -> bytes:
    from huggingface_hub import hf_hub_download

    names = [owner, *path.split("/")]
    if owner == "datasets":
        names = names[1:]
    local = hf_hub_download("/".join(names[:2]), "/".join(names[2:]), repo_type="dataset")
    with Path(local).open("rb") as stream:
        return stream.read(max_bytes)


def _get_object(bucket: str, key: str, max_bytes: int, signature: Any = None, **access: Any) -> bytes:
    """The first bytes of an object, by the S3 protocol."""
    from boto3.session import Session
    from botocore.config import Config

    retries = {"total_max_attempts": 2}
    config = Config(
        connect_timeout=_TIMEOUT_SECONDS,
        read_timeout=_TIMEOUT_SECONDS,
        retries=retries,
        signature_version=signature,
    )
    found = Session().client("s3", config=config, **access).get_object(Bucket=bucket, Key=key)
    return bytes(found["Body"].read(max_bytes))


_READERS: dict[str, _Reader] = {"s3": _from_s3, "gs": _from_google, "az": _from_azure, "hf": _from_hub}
