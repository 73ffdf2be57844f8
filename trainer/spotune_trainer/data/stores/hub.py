"""Datasets on the Hugging Face Hub, by its own client. A file is read from the commit at which it was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spotune_trainer.data.stores.stored_file import StoredFile


class HubStore:
    """Data files of datasets. The bucket is ``owner/name`` or ``owner/name@revision``."""

    def list_files(self, bucket: str, prefix: str) -> Iterator[StoredFile]:
        """See `Store`."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        name, _, revision = bucket.partition("@")
        commit = HfApi().dataset_info(name, revision=revision or "main").sha or "main"
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
