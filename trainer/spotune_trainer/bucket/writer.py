"""The state of supervisor and driver in the bucket, and which machine may write it.

Each start of a supervisor claims the next writer number, and writes below `writers/<number>/` only. Readers take the
highest number that is complete. So a supervisor that is believed lost but still runs overwrites nothing that is read:
its number is lower. It notices when it looks for a higher number, and ends.

    writers/0000003/claim.json      made once, by a conditional write
    writers/0000003/complete.json   written once all of the state is there; before, readers take the number below
    writers/0000003/status.json     replaced as a whole
    writers/0000003/ledger.jsonl.parts/000000000000     logs: see `appended`

What workers write has the number of their generation, and needs no other fence.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from spotune.errors import SupersededError
from spotune_trainer.bucket.appended import AppendedFile, logs_in, pull_log
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.bucket.link import WRITERS, Link, link_of, writer_folder
from spotune_trainer.job_directory.layout import LOG_SUFFIXES, JobDirectory

_CLAIM: Final = "claim.json"
_COMPLETE: Final = "complete.json"
_STATUS: Final = "status.json"


def newest_writer(bucket: Bucket, after: int = 0) -> int:
    """The highest number that was claimed; `after` if there is none above it."""
    names = bucket.list(WRITERS, after=f"{writer_folder(after)}/~" if after else "")
    return max((int(name.split("/")[1]) for name in names), default=after)


def newest_state(bucket: Bucket) -> int:
    """The highest number whose writer has uploaded all of its state; 0 if there is none."""
    names = bucket.list(WRITERS)
    return max((int(name.split("/")[1]) for name in names if name.endswith(f"/{_COMPLETE}")), default=0)


def newest_status(bucket: Bucket) -> bytes | None:
    """The status of the run that writes now, or wrote last; None before the first."""
    number = newest_writer(bucket)
    return bucket.read(f"{writer_folder(number)}/{_STATUS}") if number else None


def claim_writer(bucket: Bucket) -> Link:
    """Claim the next number for this machine. Whoever wrote before is fenced off."""
    number = newest_writer(bucket)
    claimed_by = {"host": socket.gethostname(), "process": os.getpid(), "time": time.time(), "id": uuid.uuid4().hex}
    content = json.dumps(claimed_by).encode()
    while True:
        number += 1
        if bucket.create(f"{writer_folder(number)}/{_CLAIM}", content):
            return Link(bucket.url, number)


def pull_state(bucket: Bucket, directory: JobDirectory) -> None:
    """Make the local state of supervisor and driver that of the bucket, unless it is the newer one.

    It is the newer one if this machine wrote last: then it has what the last upload did not.
    """
    link, number = link_of(directory), newest_state(bucket)
    if number == 0 or (link is not None and link.writer >= number):
        return
    for path in _state_files(directory):
        path.unlink()
    folder = f"{writer_folder(number)}/"
    sizes = bucket.list(writer_folder(number))
    logs = logs_in(sizes)
    for name, parts in logs.items():
        pull_log(bucket, name, parts, directory.root / name.removeprefix(folder))
    replaced = [name for name in sizes if ".parts/" not in name and not name.endswith((f"/{_CLAIM}", f"/{_COMPLETE}"))]
    bucket.download_all((name, directory.root / name.removeprefix(folder)) for name in replaced)


class StateUpload:
    """Uploads what has changed of the state of supervisor and driver. Not for several threads at a time.

    Args:
        bucket: the bucket.
        directory: of the job.
        link: what `claim_writer` returned.
    """

    def __init__(self, bucket: Bucket, directory: JobDirectory, link: Link) -> None:
        self._bucket = bucket
        self._directory = directory
        self._link = link
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._logs: dict[Path, AppendedFile] = {}
        self._is_complete = False

    def push(self) -> None:
        """Upload all that has changed since the last call, and delete what has gone.

        Raises:
            BucketError: the bucket does not accept it; a later call continues.
        """
        paths = list(_state_files(self._directory))
        for path in paths:
            self._push(path)
        for path in self._uploaded.keys() - set(paths):
            self._bucket.delete([self._name(path)])
            del self._uploaded[path]
        if not self._is_complete:
            self._bucket.write(self._link.name(_COMPLETE), b"{}")
            self._is_complete = True
            self._delete_older()

    def push_ledger(self) -> None:
        """Upload new events alone. Raises as `push`."""
        if self._directory.ledger.exists():
            self._push(self._directory.ledger)

    def raise_if_superseded(self) -> None:
        """Check the fence.

        Raises:
            SupersededError: a later supervisor has taken over.
        """
        if newest_writer(self._bucket, self._link.writer) > self._link.writer:
            raise SupersededError(
                f"another run of this job has taken over {self._bucket.url}; nothing of this one is read any more"
            )

    def _push(self, path: Path) -> None:
        if path.name.endswith(LOG_SUFFIXES) or path.is_relative_to(self._directory.tensorboard):
            log = self._logs.get(path)
            if log is None:
                log = self._logs[path] = AppendedFile(self._bucket, self._name(path), path)
            log.push()
            return
        try:
            found = path.stat()
            version = found.st_mtime_ns, found.st_size
            if self._uploaded.get(path) == version:
                return
            self._bucket.write(self._name(path), path.read_bytes())
        except FileNotFoundError:  # deleted meanwhile
            return
        self._uploaded[path] = version

    def _name(self, path: Path) -> str:
        return self._link.name(str(path.relative_to(self._directory.root)))

    def _delete_older(self) -> None:
        """Delete what earlier writers wrote, now that this one has uploaded all of it. Their claims stay."""
        own = self._link.name("")
        names = self._bucket.list(WRITERS)
        self._bucket.delete(name for name in names if name < own and not name.endswith(f"/{_CLAIM}"))


def push_file(bucket: Bucket, directory: JobDirectory, link: Link, path: Path) -> None:
    """Upload a file of the driver at once, for what has to be durable before the driver goes on."""
    bucket.write(link.name(str(path.relative_to(directory.root))), path.read_bytes())


def _state_files(directory: JobDirectory) -> Iterator[Path]:
    """The files that supervisor and driver write for others, and that exist."""
    single = (
        *(directory.job, directory.plan, directory.status, directory.ledger, directory.result),
        *(directory.preflight, directory.harness, directory.code_source),
    )
    yield from (path for path in single if path.exists())
    yield from sorted(directory.logs.glob("driver-*.log"))
    for folder in (directory.tensorboard, directory.profile):
        yield from sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
