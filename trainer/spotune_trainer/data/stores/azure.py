"""Azure Blob Storage, by its own client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from spotune.errors import JobError
from spotune_trainer.data.stores.stored_file import STALLED_SECONDS, ChangedFileError, StoredFile

_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"


def azure_client(**options: Any) -> Any:
    """Azure's ``BlobServiceClient`` for the account of the environment.

    `$AZURE_STORAGE_CONNECTION_STRING` names account, key and endpoint. Without it, `$AZURE_ACCOUNT_NAME` names the
    account, and `$AZURE_ACCOUNT_ACCESS_KEY` its key; without a key, a login or a workload identity is used.
    `$AZURE_STORAGE_ENDPOINT` is the account's URL where that is not ``https://ACCOUNT.blob.core.windows.net``: in a
    sovereign cloud, behind a private domain, or of an emulator.

    Args:
        options: Of the client, such as time-outs.

    Raises:
        JobError: No account is named, or the connection string is malformed.
    """
    from azure.storage.blob import BlobServiceClient

    connection = os.environ.get(_CONNECTION)
    if connection:
        try:
            return BlobServiceClient.from_connection_string(connection, **options)
        except ValueError as error:
            raise JobError(f"the environment variable {_CONNECTION} is malformed: {error}") from error
    account = os.environ.get("AZURE_ACCOUNT_NAME")
    if not account:
        raise JobError(
            "az:// needs the environment variable AZURE_ACCOUNT_NAME: set it to the account's name, or set "
            f"{_CONNECTION}"
        )
    url = os.environ.get("AZURE_STORAGE_ENDPOINT") or f"https://{account}.blob.core.windows.net"
    return BlobServiceClient(url, credential=_credential(account), **options)


def _credential(account: str) -> Any:
    key = os.environ.get("AZURE_ACCOUNT_ACCESS_KEY")
    if key:
        return {"account_name": account, "account_key": key}
    from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential

    return ChainedTokenCredential(AzureCliCredential(), DefaultAzureCredential())


class AzureStore:
    """Containers of the account of the environment, see `azure_client`."""

    def __init__(self) -> None:
        self._client = azure_client(read_timeout=STALLED_SECONDS)

    def list_files(self, bucket: str, prefix: str) -> Iterator[StoredFile]:
        """See `Store`."""
        for blob in self._client.get_container_client(bucket).list_blobs(name_starts_with=prefix):
            yield StoredFile(f"az://{bucket}/{blob.name}", bucket, blob.name, blob.size, blob.etag.strip('"'))

    def download(self, file: StoredFile, target: Path) -> None:
        """See `Store`."""
        from azure.core import MatchConditions
        from azure.core.exceptions import ResourceModifiedError

        blob = self._client.get_blob_client(file.bucket, file.key)
        try:
            content = blob.download_blob(etag=f'"{file.version}"', match_condition=MatchConditions.IfNotModified)
            with target.open("xb") as stream:
                content.readinto(stream)
        except ResourceModifiedError as error:
            raise ChangedFileError from error

    def upload(self, bucket: str, key: str, content: bytes) -> None:
        """See `WritableStore`."""
        self._client.get_blob_client(bucket, key).upload_blob(content, overwrite=True)

    def delete(self, bucket: str, key: str) -> None:
        """See `WritableStore`."""
        from azure.core.exceptions import ResourceNotFoundError

        with suppress(ResourceNotFoundError):  # an attempt whose answer was lost has deleted it
            self._client.get_blob_client(bucket, key).delete_blob()
