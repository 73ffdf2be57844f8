"""One small object of an object store, read without MosaicML streaming, which would bring torch with it.

The clients, and the variables that they are set up by, are those that streaming uses, so what can be read here can be
read there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotune.errors import InfrastructureError, JobError

_TIMEOUT_SECONDS = 10

_Reader = Callable[[str, str, int], bytes]
"""Bucket (or container, or owner of a repository), key, and most bytes to read."""


def read_object(url: str, most_bytes: int, field: str) -> bytes:
    """The first bytes of an object at an `s3://`, `gs://`, `az://` or `hf://` URL.

    Args:
        url: of the object.
        most_bytes: to read.
        field: of the job that named it, for messages.

    Raises:
        JobError: there is no store of this scheme.
        InfrastructureError: it could not be read.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme not in _READERS:
        raise JobError(
            f"{field}: unknown scheme of {url}; use {', '.join(f'{name}://' for name in _READERS)} or a path"
        )
    try:
        return _READERS[scheme](bucket, key, most_bytes)
    except Exception as error:  # the clients of four stores share no base class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InfrastructureError(
            f"{field}: {url} cannot be read ({reason}): check that it is there, the credentials of the store "
            "(dataset.credentials, workers.serviceAccountName), and that the cluster may reach it"
        ) from error


def _from_s3(bucket: str, key: str, most_bytes: int) -> bytes:
    from botocore import UNSIGNED
    from botocore.exceptions import NoCredentialsError

    endpoint = os.environ.get("S3_ENDPOINT_URL")
    try:
        return _get_object(bucket, key, most_bytes, endpoint_url=endpoint)
    except NoCredentialsError:  # a public bucket needs none
        return _get_object(bucket, key, most_bytes, UNSIGNED, endpoint_url=endpoint)


def _from_google(bucket: str, key: str, most_bytes: int) -> bytes:
    if "GCS_KEY" in os.environ and "GCS_SECRET" in os.environ:
        access = {"aws_access_key_id": os.environ["GCS_KEY"], "aws_secret_access_key": os.environ["GCS_SECRET"]}
        endpoint = "https://storage.googleapis.com"
        return _get_object(bucket, key, most_bytes, endpoint_url=endpoint, region_name="auto", **access)
    from google.cloud.storage import Client  # type: ignore[import-untyped]

    blob = Client().bucket(bucket).blob(key)
    return bytes(blob.download_as_bytes(end=most_bytes - 1, timeout=_TIMEOUT_SECONDS, retry=None))


def _from_azure(container: str, name: str, most_bytes: int) -> bytes:
    from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential
    from azure.storage.blob import BlobServiceClient

    account = os.environ.get("AZURE_ACCOUNT_NAME")
    if not account:
        raise JobError("the storage account's name is not in the environment as AZURE_ACCOUNT_NAME")
    credential: Any = os.environ.get("AZURE_ACCOUNT_ACCESS_KEY") or ChainedTokenCredential(
        AzureCliCredential(), DefaultAzureCredential()
    )
    url = f"https://{account}.blob.core.windows.net"
    timeouts: dict[str, Any] = {
        "connection_timeout": _TIMEOUT_SECONDS,
        "read_timeout": _TIMEOUT_SECONDS,
        "retry_total": 1,
    }
    with BlobServiceClient(url, credential=credential, **timeouts) as service:
        blob = service.get_blob_client(container, name)
        return blob.download_blob(offset=0, length=most_bytes).readall()


def _from_the_hub(owner: str, rest: str, most_bytes: int) -> bytes:
    from huggingface_hub import hf_hub_download

    names = [owner, *rest.split("/")]
    repository, path = names[1:3] if owner == "datasets" else names[:2], names[3:] if owner == "datasets" else names[2:]
    local = hf_hub_download("/".join(repository), "/".join(path), repo_type="dataset")
    with Path(local).open("rb") as stream:
        return stream.read(most_bytes)


def _get_object(bucket: str, key: str, most_bytes: int, signature: Any = None, **access: Any) -> bytes:
    """An object by the protocol of S3."""
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
    return bytes(found["Body"].read(most_bytes))


_READERS: dict[str, _Reader] = {"s3": _from_s3, "gs": _from_google, "az": _from_azure, "hf": _from_the_hub}
