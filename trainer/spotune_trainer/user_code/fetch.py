"""Reads the code of the user once, and gives each node a copy of it.

The code is a tar file in the job's folder, and with a bucket there, too. Its name is its version: a commit or a digest.
So a run needs its repository only once, and a branch that moves does not change the code of later worker groups.
"""

from __future__ import annotations

import io
import logging
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune.job.training.code_source import CodeFromSpec
from spotune.job_file.load import replace_fields
from spotune_trainer import files
from spotune_trainer.bucket.client import open_bucket
from spotune_trainer.bucket.link import bucket_of, link_of
from spotune_trainer.bucket.writer import push_file
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.user_code.archive import copy_config_map, unpack_archive
from spotune_trainer.user_code.git import fetch_commit

logger = logging.getLogger("spotune.driver")


def fetch_code(job: FinetuneJob, directory: JobDirectory) -> str:
    """Have the job's code in its folder; returns its version.

    Code that was read before from the same source is not read again, except that of a ConfigMap, which costs nothing.

    Args:
        job: the job.
        directory: of the job.

    Returns:
        The commit of a repository, the SHA-256 of an archive, or a digest of a ConfigMap's files; empty without
        `training.codeFrom`.

    Raises:
        JobError: the source does not exist, access is denied, or it has no such revision.
        InfrastructureError: it cannot be reached.
        BucketError: the bucket of the job cannot be reached.
    """
    code_from = job.spec.training.code_from
    if code_from is None:
        return ""
    source = _identity(code_from)
    known = files.read_json(directory.code_source) or {}
    version: str = known.get("version", "") if known.get("source") == source else ""
    if version and code_from.config_map is None and _has_archive(directory, version):
        return version
    with tempfile.TemporaryDirectory(prefix="spotune-code-") as scratch:
        folder = Path(scratch) / "code"
        try:
            found = _reader(code_from)(folder)
        except JobError as error:
            if not version or not _has_archive(directory, version):
                raise
            logger.warning("%s: goes on with the code that was read before", error)
            return version
        if not _has_archive(directory, found):
            _save(folder, directory, found)
    if (version, source) != (found, known.get("source")):
        logger.info("code of the user: %s", described(code_from, found))
        files.write_json(directory.code_source, {"source": source, "version": found})
        link = link_of(directory)
        if link is not None:  # before a group trains with it
            push_file(open_bucket(link.url), directory, link, directory.code_source)
    return found


def with_code(job: FinetuneJob, directory: JobDirectory, version: str) -> FinetuneJob:
    """The job with the code of a version in a folder of this machine, as `training.code`; without a version, the job.

    Raises:
        JobError: the code has no folder `training.codeFrom.directory`.
        BucketError: the bucket cannot be reached.
    """
    code_from = job.spec.training.code_from
    if code_from is None or not version:
        return job
    folder = files.cache_directory() / "code" / version
    if not folder.exists():
        _unpack(directory, version, folder)
    code = folder / code_from.directory
    if not code.is_dir():
        found = described(code_from, version)
        raise JobError(f"training.codeFrom.directory: {found} has no folder {code_from.directory}: correct it")
    return replace_fields(job, {"spec.training.code": str(code), "spec.training.codeFrom": None})


def described(code_from: CodeFromSpec, version: str) -> str:
    """The code in words, such as ``commit 3f2a91c of https://github.com/acme/training``."""
    short = version[:12]
    if code_from.git is not None:
        return f"commit {short} of {code_from.git.url}"
    if code_from.archive is not None:
        return f"archive {code_from.archive.source.partition('?')[0]} ({short})"
    assert code_from.config_map is not None, "exactly one source is set"
    return f"ConfigMap {code_from.config_map.name} ({short})"


def _identity(code_from: CodeFromSpec) -> dict[str, object]:
    """What decides which code is read. The token and the folder within do not."""
    return code_from.model_dump(
        mode="json", exclude_none=True, exclude={"directory": True, "git": {"token_secret_ref"}}
    )


def _reader(code_from: CodeFromSpec) -> Callable[[Path], str]:
    """The function that writes the code to a new folder and returns its version."""
    if code_from.git is not None:
        git = code_from.git
        return lambda folder: fetch_commit(git, folder)
    if code_from.archive is not None:
        archive = code_from.archive
        return lambda folder: unpack_archive(archive, folder)
    assert code_from.config_map is not None, "exactly one source is set"
    config_map = code_from.config_map
    return lambda folder: copy_config_map(config_map, folder)


def _has_archive(directory: JobDirectory, version: str) -> bool:
    """Whether the job's folder has the code of a version; with a bucket, it is downloaded from there."""
    path, bucket = directory.code(version), bucket_of(directory)
    if not path.exists() and bucket is not None:
        name = str(path.relative_to(directory.root))
        if name in bucket.list(str(path.parent.relative_to(directory.root))):
            bucket.download(name, path)
    return path.exists()


def _save(folder: Path, directory: JobDirectory, version: str) -> None:
    """Write the code of a folder to the job's folder and its bucket, without git's own data."""
    path, bucket = directory.code(version), bucket_of(directory)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(folder, arcname=".", filter=lambda member: None if member.name.endswith("/.git") else member)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, content.getvalue())
    if bucket is not None:
        bucket.upload(str(path.relative_to(directory.root)), path)


def _unpack(directory: JobDirectory, version: str, folder: Path) -> None:
    """Unpack the code for all processes of this machine. Those that do it at the same time get the same folder."""
    if not _has_archive(directory, version):
        raise JobError(f"{directory.code(version)} is gone, which had the code of the user: start again with a new job")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{version[:12]}-", dir=folder.parent) as scratch:
        own = Path(scratch) / "code"
        with tarfile.open(directory.code(version)) as archive:
            archive.extractall(own, filter="tar")
        files.fsync_tree(own)
        try:
            own.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
