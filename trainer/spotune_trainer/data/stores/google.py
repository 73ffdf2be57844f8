"""Google Cloud Storage, by its own client, or by the S3 protocol with the keys `GCS_KEY` and `GCS_SECRET`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from spotune_trainer.data.stores.s3 import S3Store
from spotune_trainer.data.stores.stored_file import STALLED_SECONDS, ChangedFileError, StoredFile, WritableStore


def google_client() -> Any:
    """Google's client, with its default credentials; `$STORAGE_EMULATOR_HOST` is its own variable for an endpoint."""
    from google.cloud.storage import Client  # type: ignore[import-untyped]

    return Client()


def google_keys() -> Mapping[str, str] | None:
    """Arguments of boto3's client for `$GCS_KEY` and `$GCS_SECRET`; None without these variables."""
    if "GCS_KEY" not in os.environ or "GCS_SECRET" not in os.environ:
        return None
    return {
        "aws_access_key_id": os.environ["GCS_KEY"],
        "aws_secret_access_key": os.environ["GCS_SECRET"],
        "endpoint_url": os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com",
        "region_name": "auto",
    }


def open_google_store() -> WritableStore:
    """The store for `gs://` URLs, with the credentials of the environment."""
    keys = google_keys()
    return GoogleStore() if keys is None else S3Store("gs", keys)


class GoogleStore:
    """Buckets by Google's client, with its default credentials."""

    def __init__(self) -> None:
        self._client = google_client()

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

    def upload(self, bucket: str, key: str, content: bytes) -> None:
        """See `WritableStore`."""
        blob = self._client.bucket(bucket).blob(key)
        blob.upload_from_string(content, content_type="application/octet-stream", timeout=STALLED_SECONDS)

    def delete(self, bucket: str, key: str) -> None:
        """See `WritableStore`."""
        from google.api_core.exceptions import NotFound

        with suppress(NotFound):  # an attempt whose answer was lost has deleted it
            self._client.bucket(bucket).blob(key).delete(timeout=STALLED_SECONDS)
