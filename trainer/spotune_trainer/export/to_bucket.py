"""Copies a finished export to the job's bucket, and back to the head, which uploads it to the Hub.

Its manifest is uploaded last, so a reader never loads half a model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

from spotune.prompting.export_manifest import MANIFEST, previous_exports
from spotune_trainer.bucket.folders import pull_folder, push_folder, replace_folder
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.job_directory.layout import JobDirectory


def upload_exports(directory: JobDirectory, heartbeat: Callable[[], None]) -> None:
    """Upload `export`, `export-ema` and the kept earlier export; does nothing if the directory is the storage.

    Args:
        directory: of the job.
        heartbeat: called after each part of a file.

    Raises:
        BucketError: the bucket does not accept them.
    """
    bucket = bucket_of(directory)
    if bucket is None:
        return
    for earlier in previous_exports(directory.export).values():
        push_folder(bucket, directory, earlier, heartbeat)
    for folder in (directory.export_ema, directory.export):
        if folder.exists():
            replace_folder(bucket, directory, folder, folder / MANIFEST, heartbeat)


def download_export(directory: JobDirectory) -> None:
    """Have the export in the bucket here, which a rank on another machine has made.

    Does nothing if it is here already, or if the directory is the storage.

    Raises:
        BucketError: the bucket cannot be read.
    """
    bucket, manifest = bucket_of(directory), directory.export / MANIFEST
    if bucket is None:
        return
    if manifest.exists() and manifest.read_bytes() == bucket.read(f"{directory.export.name}/{MANIFEST}"):
        return
    shutil.rmtree(directory.export, ignore_errors=True)
    pull_folder(bucket, directory, directory.export)


def upload_model_card(directory: JobDirectory) -> None:
    """Upload the card of the export again, which has changed; does nothing if the directory is the storage."""
    bucket, card = bucket_of(directory), directory.export / "README.md"
    if bucket is not None:
        bucket.upload(str(card.relative_to(directory.root)), card)
