"""Checkpoints and generations in a bucket: commit, fence, and what a machine has to know of them to resume.

A checkpoint counts once its manifest is in the bucket, under the same names as in a job directory. The directory of a
machine has the manifests of all of them, and the files of some: the others are downloaded when they are read. Beside
each manifest, `bucket-files.json` has the sizes of the files in the bucket.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from spotune_trainer import files
from spotune_trainer.bucket.client import Bucket, BucketError
from spotune_trainer.job_directory.layout import JobDirectory

BUCKET_FILES: Final = "bucket-files.json"
_CHECKPOINTS: Final = "checkpoints"
_GENERATIONS: Final = "generations"
_MANIFEST: Final = "manifest.json"
_POLL_SECONDS: Final = 0.5


def refresh(bucket: Bucket, directory: JobDirectory) -> dict[str, dict[str, int]]:
    """Make the generations and the manifests of a directory those of the bucket.

    Returns:
        As `list_checkpoint_files`.

    Raises:
        BucketError: the bucket cannot be read.
    """
    claimed = bucket.list(_GENERATIONS)
    _forget_withdrawn(bucket, directory, claimed)
    for name in claimed:
        _, generation, file = name.split("/")
        if not (directory.generations / generation).exists() and (content := bucket.read(name)) is not None:
            _put_record(directory.generations / generation, file, content)
    listed = list_checkpoint_files(bucket)
    committed = {name: sizes for name, sizes in listed.items() if _MANIFEST in sizes}
    for name, sizes in committed.items():
        _fetch_manifest(bucket, directory.checkpoints / name, sizes)
    for manifest in directory.checkpoints.glob(f"*/{_MANIFEST}"):
        if manifest.parent.name not in committed:  # deleted by a later generation on another machine
            manifest.unlink(missing_ok=True)
            shutil.rmtree(manifest.parent, ignore_errors=True)
    return listed


def list_checkpoint_files(bucket: Bucket) -> dict[str, dict[str, int]]:
    """Size of each file of all checkpoints, committed or not, by the name of the checkpoint."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size in bucket.list(_CHECKPOINTS).items():
        _, checkpoint, file = name.split("/", 2)
        found[checkpoint][file] = size
    return dict(found)


def fetch_manifest(bucket: Bucket, folder: Path) -> None:
    """Download the manifest of one checkpoint, if it is committed, with the sizes of its files, unless it is here."""
    if (folder / _MANIFEST).exists():
        return
    prefix = f"{_CHECKPOINTS}/{folder.name}"
    sizes = {name.removeprefix(f"{prefix}/"): size for name, size in bucket.list(prefix).items()}
    _fetch_manifest(bucket, folder, sizes)


def upload_rank_file(
    bucket: Bucket, folder: Path, name: str, ok: str, report: Callable[[int], None] = lambda _count: None
) -> None:
    """Upload a rank's file of a checkpoint, and then its `.ok` file.

    Args:
        bucket: the bucket.
        folder: of the checkpoint.
        name: of the file.
        ok: name of the `.ok` file.
        report: called with the number of bytes of each part; what it raises ends the upload.
    """
    upload_file(bucket, folder, name, report)
    bucket.write(f"{_CHECKPOINTS}/{folder.name}/{ok}", (folder / ok).read_bytes())


def upload_file(bucket: Bucket, folder: Path, name: str, report: Callable[[int], None] = lambda _count: None) -> None:
    """Upload a file of a checkpoint; arguments as for `upload_rank_file`."""
    bucket.upload(f"{_CHECKPOINTS}/{folder.name}/{name}", folder / name, report)


def wait_for_files(bucket: Bucket, checkpoint: str, names: Iterable[str], while_waiting: Callable[[], None]) -> None:
    """Wait until a checkpoint has all of these files in the bucket."""
    prefix, expected = f"{_CHECKPOINTS}/{checkpoint}", set(names)
    while not expected <= {name.removeprefix(f"{prefix}/") for name in bucket.list(prefix)}:
        while_waiting()
        time.sleep(_POLL_SECONDS)


def read_checkpoint_file(bucket: Bucket, checkpoint: str, name: str) -> Any:
    """The JSON value of a small file of a checkpoint; None if there is no such file."""
    content = bucket.read(f"{_CHECKPOINTS}/{checkpoint}/{name}")
    return json.loads(content) if content is not None else None


def put_manifest(bucket: Bucket, folder: Path, make_manifest: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Write the manifest of a checkpoint, which commits it; returns what is in the bucket.

    If an earlier attempt has written it, although its answer was lost, that manifest stays: the name has the number of
    a generation, so nobody else writes it.
    """
    name = f"{_CHECKPOINTS}/{folder.name}/{_MANIFEST}"
    if bucket.read(name) is None:
        bucket.create(name, (json.dumps(make_manifest(), indent=2) + "\n").encode())
    fetch_manifest(bucket, folder)
    manifest: dict[str, Any] | None = files.read_json(folder / _MANIFEST)
    if manifest is None:
        raise BucketError(f"{bucket.url}/{name} was deleted while it was committed")
    return manifest


def wait_for_manifest(bucket: Bucket, folder: Path, while_waiting: Callable[[], None]) -> None:
    """On a rank that does not write the manifest: wait until the checkpoint is committed, and note that here."""
    while not (folder / _MANIFEST).exists():
        while_waiting()
        fetch_manifest(bucket, folder)
        time.sleep(_POLL_SECONDS)


def delete_checkpoints(bucket: Bucket, listed: dict[str, dict[str, int]], checkpoints: Iterable[str]) -> None:
    """Delete checkpoints. Their manifests go first: a half-deleted one is none."""
    names = list(checkpoints)
    bucket.delete(f"{_CHECKPOINTS}/{name}/{_MANIFEST}" for name in names if _MANIFEST in listed[name])
    bucket.delete(f"{_CHECKPOINTS}/{name}/{file}" for name in names for file in listed[name] if file != _MANIFEST)


def claim_generation(
    bucket: Bucket, directory: JobDirectory, record: Callable[[int], dict[str, Any]], file: str
) -> int:
    """Claim the next generation by a conditional write. Of all who try to claim a number, one succeeds.

    Args:
        bucket: the bucket.
        directory: of the job; gets the record as well.
        record: makes the content for a number.
        file: name of the file in the folder of the generation.
    """
    number = newest_generation(bucket)
    claim = uuid.uuid4().hex
    while True:
        number += 1
        content = (json.dumps({**record(number), "claim": claim}, indent=2) + "\n").encode()
        folder = directory.generations / f"{number:07d}"
        if bucket.create(f"{_GENERATIONS}/{folder.name}/{file}", content):
            _put_record(folder, file, content)
            return number


def withdraw_generation(bucket: Bucket, number: int) -> None:
    """Delete the claim of a generation."""
    bucket.delete(bucket.list(f"{_GENERATIONS}/{number:07d}"))


def newest_generation(bucket: Bucket, after: int = 0) -> int:
    """The highest number of a generation; `after` if there is none above it."""
    names = bucket.list(_GENERATIONS, after=f"{_GENERATIONS}/{after:07d}/~" if after else "")
    return max((int(name.split("/")[1]) for name in names), default=after)


def _put_record(folder: Path, file: str, content: bytes) -> None:
    """Make the folder of a generation, which appears with its record. Other processes may do so, too."""
    draft = folder.with_name(f".claim-{uuid.uuid4().hex[:8]}")
    draft.mkdir(parents=True)
    files.write_bytes(draft / file, content)
    try:
        draft.rename(folder)
    except OSError as error:
        shutil.rmtree(draft)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def remove_record(folder: Path) -> None:
    """Remove the folder of a generation, which disappears with its record. Other processes may do so, too."""
    draft = folder.with_name(f".claim-{uuid.uuid4().hex[:8]}")
    with suppress(FileNotFoundError):
        folder.rename(draft)
        files.fsync_directory(folder.parent)
        shutil.rmtree(draft)


def _forget_withdrawn(bucket: Bucket, directory: JobDirectory, claimed: Iterable[str]) -> None:
    """Remove generations whose claims were withdrawn. The number of the newest one may have been claimed again."""
    listed, numbers = {name.split("/")[1] for name in claimed}, directory.generation_numbers()
    for number in numbers:
        folder = directory.generations / f"{number:07d}"
        if folder.name not in listed or number == numbers[-1]:
            _remove_unless_claimed(bucket, folder)


def _remove_unless_claimed(bucket: Bucket, folder: Path) -> None:
    """Remove the record of a generation that the bucket does not have, or has of another claim."""
    with suppress(FileNotFoundError):  # another process has removed it
        for path in folder.iterdir():
            if bucket.read(f"{_GENERATIONS}/{folder.name}/{path.name}") != path.read_bytes():
                remove_record(folder)


def _fetch_manifest(bucket: Bucket, folder: Path, sizes: dict[str, int]) -> None:
    """Write sizes and manifest of a committed checkpoint to its folder, the manifest last."""
    if _MANIFEST not in sizes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: size for name, size in sizes.items() if name != _MANIFEST}
    if files.read_json(folder / BUCKET_FILES) != sizes:
        files.write_json(folder / BUCKET_FILES, sizes, durable=False)
    if not (folder / _MANIFEST).exists():
        content = bucket.read(f"{_CHECKPOINTS}/{folder.name}/{_MANIFEST}")
        if content is not None:  # otherwise a worker group has deleted it since it was listed
            files.write_bytes(folder / _MANIFEST, content, durable=False)
