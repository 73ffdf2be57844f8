"""Datasets on the Hugging Face Hub, by its own client. A file is read from the commit at which it was found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from spotune.errors import JobError
from spotune_trainer.data.stores.stored_file import StoredFile

_REVISION: Final = r"refs/convert/\w+(?=/|$)|refs/pr/\d+(?=/|$)|[^/]+"
"""As in the Hub's own URLs: slashes are for its own references only, and %2F in names of branches."""
_DATASET: Final = re.compile(rf"(?P<name>[^/@]+/[^/@]+)(?P<revision>@(?:{_REVISION}))?/*(?P<path>.*)")


def parse_dataset(source: str) -> tuple[str, str]:
    """Bucket and path of ``hf://datasets/owner/name@revision/path``, without a slash at the end.

    Raises:
        JobError: It names no dataset.
    """
    found = _DATASET.fullmatch(source.partition("://")[2].removeprefix("datasets/"))
    if found is None:
        raise JobError(f"{source} names no dataset: write hf://datasets/owner/name, then a file, folder or pattern")
    revision = found["revision"] or ""
    if revision == "@refs":
        raise JobError(
            f"{source} has a revision with slashes: write each of them as %2F, as in name@refs%2Fheads%2Fdev"
        )
    return found["name"] + revision, found["path"].rstrip("/")


def revision_of(bucket: str) -> str:
    """The revision that a bucket names, as the Hub knows it."""
    return unquote(bucket.partition("@")[2]) or "main"


class HubStore:
    """Data files of datasets. The bucket is ``owner/name`` or ``owner/name@revision``, as in the URL."""

    def list_files(self, bucket: str, prefix: str) -> Iterator[StoredFile]:
        """See `Store`."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        name = bucket.partition("@")[0]
        commit = HfApi().dataset_info(name, revision=revision_of(bucket)).sha or "main"
        folder = prefix.rpartition("/")[0] or None
        tree = HfApi().list_repo_tree(name, folder, recursive=True, revision=commit, repo_type="dataset")
        try:
            for found in tree:
                if isinstance(found, RepoFile) and found.path.startswith(prefix):
                    version = found.lfs.sha256 if found.lfs is not None else found.blob_id
                    url = f"hf://datasets/{bucket}/{found.path}"
                    yield StoredFile(url, bucket, found.path, found.size, version, commit)
        except EntryNotFoundError:  # there is no such folder
            return

    def download(self, file: StoredFile, target: Path) -> None:
        """See `Store`."""
        from huggingface_hub import hf_hub_download

        name = file.bucket.partition("@")[0]
        copy = hf_hub_download(  # not into the Hub's cache, where it would stay
            name, file.key, repo_type="dataset", revision=file.revision, local_dir=target.with_name(".hub")
        )
        Path(copy).rename(target)
