"""Azure Blob Storage, by its own client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spotune.errors import JobError
from spotune_trainer.data.stores.stored_file import STALLED_SECONDS, ChangedFileError, StoredFile


def open_azure_store() -> AzureStore:
    """The store for `az://` URLs: the containers of the account `$AZURE_ACCOUNT_NAME`.

    Raises:
        JobError: The variable is not set.
    """
    from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential
    from azure.storage.blob import BlobServiceClient

    account = os.environ.get("AZURE_ACCOUNT_NAME")
    if not account:
        raise JobError("az:// needs the environment variable AZURE_ACCOUNT_NAME: set it to the account's name")
    credential: Any = os.environ.get("AZURE_ACCOUNT_ACCESS_KEY") or ChainedTokenCredential(
        AzureCliCredential(), DefaultAzureCredential()
    )
    url = f"https://{account}.blob.core.windows.net"
    return AzureStore(BlobServiceClient(url, credential=credential, read_timeout=STALLED_SECONDS))


class AzureStore:
    """Containers of one account.

    Args:
        client: Azure's ``BlobServiceClient``.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

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
