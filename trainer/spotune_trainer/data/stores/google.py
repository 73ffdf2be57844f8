"""Google Cloud Storage, by its own client, or by the S3 protocol with the keys `GCS_KEY` and `GCS_SECRET`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from spotune_trainer.data.stores.s3 import S3Store
from spotune_trainer.data.stores.stored_file import STALLED_SECONDS, ChangedFileError, Store, StoredFile


def open_google_store() -> Store:
    """The store for `gs://` URLs, with the credentials of the environment."""
    if "GCS_KEY" not in os.environ or "GCS_SECRET" not in os.environ:
        return GoogleStore()
    access = {
        "aws_access_key_id": os.environ["GCS_KEY"],
        "aws_secret_access_key": os.environ["GCS_SECRET"],
        "endpoint_url": "https://storage.googleapis.com",
        "region_name": "auto",
    }
    return S3Store("gs", access)


class GoogleStore:
    """Buckets by Google's client, with its default credentials."""

    def __init__(self) -> None:
        from google.cloud.storage import Client  # type: ignore[import-untyped]

        self._client = Client()

    def list_files(self, bucket: str, prefix: str) -> Iterator[StoredFile]:
        """See `Store`."""
        for blob in self._client.list_blobs(bucket, prefix=prefix, timeout=STALLED_SECONDS):
            yield StoredFile(f"gs://{bucket}/{blob.name}", bucket, blob.name, blob.size, str(blob.generation))

    def download(self, file: StoredFile, target: Path) -> None:
        """See `Store`."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._client.bucket(file.bucket).blob(file.key)
        generation = int(file.version)
        try:
            blob.download_to_filename(str(target), if_generation_match=generation, timeout=STALLED_SECONDS)
        except PreconditionFailed as error:
            raise ChangedFileError from error
        blob.reload(timeout=STALLED_SECONDS)
        if blob.generation != generation:  # fake-gcs-server ignores the condition
            raise ChangedFileError
