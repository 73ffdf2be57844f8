"""Reads the files of an archive, and those of a mounted ConfigMap."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from spotune.errors import InfrastructureError, JobError
from spotune.job.training.code_source import CONFIG_MAP_FOLDER, ArchiveSource, ConfigMapSource
from spotune_trainer.data.stores.find import find_stored_files, local_copy

ARCHIVE: Final = "training.codeFrom.archive"
CONFIG_MAP: Final = "training.codeFrom.configMap"
_CURRENT: Final = "..data"
"""Link in a mounted ConfigMap to the folder with its newest content."""


def unpack_archive(source: ArchiveSource, folder: Path) -> str:
    """Write the files of an archive to a new folder; returns the SHA-256 of the archive in hex.

    Raises:
        JobError: there is no such file, access is denied, or it is another or no archive.
        InfrastructureError: the store cannot be reached.
    """
    with _local(source.source, folder.with_name("download")) as path:
        digest = _sha256(path)
        if source.sha256 and digest != source.sha256:
            raise JobError(f"{ARCHIVE}.sha256: {source.source} has {digest}: correct it, or put the file back")
        try:
            if tarfile.is_tarfile(path):
                shutil.unpack_archive(path, folder, "tar", filter="data")
            else:
                shutil.unpack_archive(path, folder, "zip")
        except (shutil.ReadError, tarfile.TarError, OSError, EOFError) as error:
            raise JobError(f"{ARCHIVE}.source: {source.source} cannot be unpacked: {error}") from error
    return digest


def copy_config_map(source: ConfigMapSource, folder: Path) -> str:
    """Copy the files of a mounted ConfigMap to a new folder; returns a digest of their names and contents in hex.

    Raises:
        JobError: there is no such ConfigMap, or this is no pod.
        InfrastructureError: it changes at this moment.
    """
    mounted = os.environ.get(CONFIG_MAP_FOLDER)
    if not mounted:
        raise JobError(f"{CONFIG_MAP} needs a cluster: on one machine, set training.code to a folder with the files")
    current = Path(mounted) / _CURRENT
    try:
        content = {path.name: path.read_bytes() for path in sorted(current.resolve(strict=True).iterdir())}
    except FileNotFoundError as error:
        if current.is_symlink():
            raise InfrastructureError(f"{CONFIG_MAP}: {source.name} changes at this moment") from error
        content = {}
    if not content:
        raise JobError(f"{CONFIG_MAP}.name: there is no ConfigMap {source.name} with files in the job's namespace")
    digest = hashlib.sha256()
    folder.mkdir()
    for name, text in content.items():
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
        (folder / name).write_bytes(text)
    return digest.hexdigest()


@contextmanager
def _local(source: str, folder: Path) -> Iterator[Path]:
    """The archive as a file of this machine."""
    if "://" not in source:
        if not Path(source).is_file():
            raise JobError(f"{ARCHIVE}.source: there is no file {source}: correct it, or put the archive there")
        yield Path(source)
        return
    try:
        found = find_stored_files(source)
        with local_copy(found[0], folder) as path:
            yield path
    except JobError as error:
        raise JobError(f"{ARCHIVE}.source: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
