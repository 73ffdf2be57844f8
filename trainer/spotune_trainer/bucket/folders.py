"""Folders of files: shards and reference log-probabilities, which are written once, and exports, which are replaced."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from spotune.prompting.export_manifest import MANIFEST
from spotune_trainer.bucket.appended import logs_in, pull_log
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.job_directory.layout import JobDirectory

_LOCK_POLL_SECONDS: Final = 0.2
_LAST_OF_EXPORTS: Final = (MANIFEST, "manifest.json")
"""What `replace_folder` uploads last: of an export, and of files that code of the user has saved."""


def push_folder(
    bucket: Bucket,
    directory: JobDirectory,
    folder: Path,
    heartbeat: Callable[[], None] = lambda: None,
    last: str = "",
) -> None:
    """Upload the files of a folder that the bucket lacks, or has with another size. All are there on return.

    Args:
        bucket: the bucket.
        directory: of the job.
        folder: a folder of the job.
        heartbeat: called after each part of a file.
        last: name of files that are uploaded last, because they say that the others are there.
    """
    name = str(folder.relative_to(directory.root))
    paths = sorted(_files(folder), key=lambda path: path.name == last)
    have = bucket.list(name) if paths else {}
    for path in paths:
        found = str(path.relative_to(directory.root))
        if have.get(found) != path.stat().st_size:
            bucket.upload(found, path, lambda _count: heartbeat())


def replace_folder(
    bucket: Bucket, directory: JobDirectory, folder: Path, last: Path, heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Replace a folder in the bucket.

    Args:
        bucket: the bucket.
        directory: of the job.
        folder: the folder, which is complete.
        last: a file in it that readers begin with. It is deleted first, and uploaded last.
        heartbeat: called after each part of a file.
    """
    name, last_name = str(folder.relative_to(directory.root)), str(last.relative_to(directory.root))
    bucket.delete([last_name])
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    paths = {str(path.relative_to(directory.root)): path for path in found}
    for each, path in paths.items():
        if each != last_name:
            bucket.upload(each, path, lambda _count: heartbeat())
    bucket.delete(each for each in bucket.list(name) if each not in paths)
    bucket.upload(last_name, last)


def pull_folder(
    bucket: Bucket, directory: JobDirectory, folder: Path, heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Download the files of a folder that are missing here, or have another size here.

    Args:
        bucket: the bucket.
        directory: of the job.
        folder: a folder of the job.
        heartbeat: called after each file.
    """
    sizes = bucket.list(str(folder.relative_to(directory.root)))
    missing = [name for name, size in sizes.items() if _size(directory.root / name) != size]
    bucket.download_all(((name, directory.root / name) for name in missing), heartbeat)


def pull_export(bucket: Bucket, directory: JobDirectory, folder: Path) -> None:
    """As `pull_folder`, for a folder that `replace_folder` uploads: files of another export may have the same sizes."""
    for path in (folder / name for name in _LAST_OF_EXPORTS):
        if path.exists() and bucket.read(str(path.relative_to(directory.root))) not in (None, path.read_bytes()):
            shutil.rmtree(folder)
    pull_folder(bucket, directory, folder)


def pull_for_ranks(bucket: Bucket, directory: JobDirectory, heartbeat: Callable[[], None]) -> None:
    """Have shards, reference log-probabilities and compiled code on this node. Of its ranks, one downloads them."""
    directory.root.mkdir(parents=True, exist_ok=True)
    with (directory.root / ".download.lock").open("w") as lock:
        while not _is_locked(lock):
            heartbeat()
            time.sleep(_LOCK_POLL_SECONDS)
        for folder in (directory.data, directory.reference, directory.compiled):
            pull_folder(bucket, directory, folder, heartbeat)


def pull_generation_logs(bucket: Bucket, directory: JobDirectory) -> None:
    """Download what the workers of all generations logged. Logs that are longer here stay as they are."""
    sizes = bucket.list(str(directory.logs.relative_to(directory.root)))
    for name, parts in logs_in(sizes).items():
        pull_log(bucket, name, parts, directory.root / name)
    replaced = [name for name in sizes if ".parts/" not in name and not (directory.root / name).exists()]
    bucket.download_all((name, directory.root / name) for name in replaced)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def _is_locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
