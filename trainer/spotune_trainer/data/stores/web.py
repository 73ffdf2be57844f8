"""Single files on web servers."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

from spotune.errors import JobError
from spotune_trainer.data.stores.stored_file import READ_BYTES, STALLED_SECONDS, ChangedFileError, StoredFile


class WebStore:
    """Files at `http://` or `https://` URLs. Web servers list no folders.

    Args:
        scheme: ``http`` or ``https``.
    """

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme

    def list_files(self, bucket: str, prefix: str) -> Iterator[StoredFile]:
        """The file `prefix` itself, with its query.

        Raises:
            JobError: The server does not say how long the file is, or which version it is.
        """
        url = f"{self._scheme}://{bucket}/{prefix}"
        with _open(url) as response:
            size, version = response.headers["Content-Length"], _version(response)
        name = f"{self._scheme}://{bucket}{urlsplit(url).path}"  # a query may hold a signature
        if not size or not version:
            missing = "Content-Length" if not size else "ETag or Last-Modified"
            raise JobError(
                f"{name}: the server sends no {missing}, so a change of the file would go unnoticed: download it and "
                "name its path"
            )
        yield StoredFile(name, bucket, prefix, int(size), version)

    def download(self, file: StoredFile, target: Path) -> None:
        """See `Store`."""
        with _open(f"{self._scheme}://{file.bucket}/{file.key}") as response:
            if _version(response) != file.version:
                raise ChangedFileError
            with target.open("xb") as stream:
                shutil.copyfileobj(response, stream, READ_BYTES)


def _open(url: str) -> HTTPResponse:
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
    response: HTTPResponse = urllib.request.urlopen(request, timeout=STALLED_SECONDS)
    return response


def _version(response: HTTPResponse) -> str:
    return str(response.headers["ETag"] or response.headers["Last-Modified"] or "")
