"""S3 and stores with its protocol, by boto3."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spotune_trainer.data.stores.stored_file import READ_BYTES, STALLED_SECONDS, ChangedFileError, StoredFile


class S3Store:
    """Buckets with the S3 protocol. Without credentials, requests are not signed, as public buckets allow.

    Args:
        scheme: of the URLs.
        access: Arguments of boto3's client; None: the endpoint of `$S3_ENDPOINT_URL`, and boto3's own credentials.
    """

    def __init__(self, scheme: str = "s3", access: Mapping[str, str] | None = None) -> None:
        self._scheme = scheme
        self._access = {"endpoint_url": os.environ.get("S3_ENDPOINT_URL")} if access is None else access
        self._client = self._connect()

    def list_files(self, bucket: str, prefix: str) -> Iterator[StoredFile]:
        """See `Store`."""
        token: dict[str, str] = {}
        while True:
            page = self._request("list_objects_v2", Bucket=bucket, Prefix=prefix, **token)
            for found in page.get("Contents", ()):
                url = f"{self._scheme}://{bucket}/{found['Key']}"
                yield StoredFile(url, bucket, found["Key"], found["Size"], found["ETag"].strip('"'))
            if not page["IsTruncated"]:
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def download(self, file: StoredFile, target: Path) -> None:
        """See `Store`."""
        from botocore.exceptions import ClientError

        try:
            found = self._request("get_object", Bucket=file.bucket, Key=file.key, IfMatch=f'"{file.version}"')
        except ClientError as error:
            if error.response["Error"]["Code"] in {"PreconditionFailed", "412"}:
                raise ChangedFileError from error
            raise
        if found["ETag"].strip('"') != file.version:  # some stores with this protocol ignore the condition
            found["Body"].close()
            raise ChangedFileError
        with found["Body"] as body, target.open("xb") as stream:
            shutil.copyfileobj(body, stream, READ_BYTES)

    def upload(self, bucket: str, key: str, content: bytes) -> None:
        """See `WritableStore`."""
        digest = hashlib.md5(content, usedforsecurity=False).digest()
        # Stores with this protocol know this checksum, and some no newer one, which boto3 would send.
        checksum = base64.b64encode(digest).decode()
        self._request("put_object", Bucket=bucket, Key=key, Body=content, ContentMD5=checksum)

    def delete(self, bucket: str, key: str) -> None:
        """See `WritableStore`."""
        self._request("delete_object", Bucket=bucket, Key=key)

    def _request(self, operation: str, **arguments: Any) -> Any:
        from botocore.exceptions import NoCredentialsError

        try:
            return getattr(self._client, operation)(**arguments)
        except NoCredentialsError:
            self._client = self._connect(signed=False)
            return getattr(self._client, operation)(**arguments)

    def _connect(self, *, signed: bool = True) -> Any:
        from boto3.session import Session
        from botocore import UNSIGNED
        from botocore.config import Config

        retries = {"mode": "adaptive"}
        signature = None if signed else UNSIGNED
        config = Config(
            read_timeout=STALLED_SECONDS,
            retries=retries,
            signature_version=signature,
            request_checksum_calculation="when_required",
        )
        return Session().client("s3", config=config, **self._access)
