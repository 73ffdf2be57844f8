"""Keeps the state of supervisor and driver in the bucket while a supervisor runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from spotune.errors import InfrastructureError, SupersededError
from spotune_trainer.bucket.checkpoints import refresh
from spotune_trainer.bucket.client import Bucket, BucketError
from spotune_trainer.bucket.folders import pull_export, pull_folder, pull_generation_logs
from spotune_trainer.bucket.link import Link, link_of, put_link
from spotune_trainer.bucket.writer import StateUpload, claim_writer, pull_state
from spotune_trainer.job_directory.layout import JobDirectory

PUSH_SECONDS: Final = 5.0
LEDGER_SECONDS: Final = 0.5
"""The ledger grows rarely, and what it says must not be lost with the machine: new events are uploaded so soon."""
_LAST_PUSH_SECONDS: Final = 300.0
"""How long the end of a run waits for a bucket that cannot be reached."""


DATA: Final = ("data",)
"""What the head of a cluster downloads beside state and logs. Its workers download the other folders."""
_EXPORTS: Final = ("export", "export-ema")
_ALL: Final = ("data", "reference", *_EXPORTS)


def pull_job(bucket: Bucket, directory: JobDirectory, folders: Iterable[str] = _ALL) -> None:
    """Have everything on this machine that a run needs to continue, except for the files of checkpoints.

    Writes nothing to the bucket, so a run on another machine is not disturbed.

    Args:
        bucket: the bucket.
        directory: of the job.
        folders: names of the folders with other files, such as data.

    Raises:
        BucketError: the bucket cannot be read.
    """
    if link_of(directory) is None:
        put_link(directory, Link(bucket.url))  # what is downloaded belongs to this bucket, whenever this process ends
    pull_state(bucket, directory)
    refresh(bucket, directory)
    pull_generation_logs(bucket, directory)
    for folder in folders:
        pull = pull_export if folder in _EXPORTS else pull_folder
        pull(bucket, directory, directory.root / folder)


@contextmanager
def mirrored(
    bucket: Bucket | None, directory: JobDirectory, log: Callable[[str], None], folders: Iterable[str] = _ALL
) -> Iterator[StateMirror | None]:
    """A `StateMirror` for a directory whose storage is a bucket; None for one that is the storage itself."""
    if bucket is None:
        yield None
        return
    with StateMirror(bucket, directory, log, folders=folders) as mirror:
        yield mirror


class StateMirror:
    """Uploads what has changed every few seconds, events at once, and at exit all of it; a context manager.

    Entering it takes the job over: whoever wrote to this bucket before is fenced off.

    Args:
        bucket: the bucket.
        directory: of the job, after `pull_job`.
        log: gets a message when the bucket cannot be reached, and when it can be again.
        clock: seconds, monotonic.
        sleep: waits for some seconds.
        folders: as for `pull_job`.

    Raises:
        InfrastructureError: at entry, if the bucket cannot be used; at exit, if it cannot be reached for minutes.
    """

    def __init__(
        self,
        bucket: Bucket,
        directory: JobDirectory,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        folders: Iterable[str] = _ALL,
    ) -> None:
        self._bucket = bucket
        self._directory = directory
        self._log = log
        self._folders = tuple(folders)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._superseded: SupersededError | None = None
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="state-mirror", daemon=True)

    @property
    def problem(self) -> str | None:
        """Why the last upload failed; None if it did not."""
        return self._problem

    def __enter__(self) -> Self:
        try:
            link = claim_writer(self._bucket)
            # Again, because the earlier writer may have gone on until now.
            pull_job(self._bucket, self._directory, self._folders)
            put_link(self._directory, link)
            self._upload = StateUpload(self._bucket, self._directory, link)
            self._upload.push()
        except BucketError as error:
            raise InfrastructureError(str(error)) from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        if self._superseded is None and not isinstance(error, SupersededError):
            self._push_finally()

    def raise_if_superseded(self) -> None:
        """Raise the SupersededError that the last look at the bucket found, if it found one."""
        if self._superseded is not None:
            raise self._superseded

    def push(self) -> None:
        """Upload what has changed now, if the bucket can be reached; otherwise the thread does it later."""
        if self._try(self._upload.push):
            self._report(None)

    def _try(self, push: Callable[[], None]) -> bool:
        """Upload something; report why if it failed. Returns whether it succeeded."""
        try:
            with self._lock:
                push()
        except OSError as error:  # of the bucket, or of a local file
            self._report(str(error))
            return False
        return True

    def _run(self) -> None:
        pushed = self._clock()
        while not self._closing.wait(min(LEDGER_SECONDS, PUSH_SECONDS)):
            if self._clock() - pushed < PUSH_SECONDS:
                self._try(self._upload.push_ledger)
                continue
            pushed = self._clock()
            self.push()
            try:
                self._upload.raise_if_superseded()
            except SupersededError as error:
                self._superseded = error
                return
            except OSError as error:
                self._report(str(error))

    def _push_finally(self) -> None:
        until = self._clock() + _LAST_PUSH_SECONDS
        while True:
            self.push()
            if self._problem is None:
                return
            if self._clock() > until:
                raise InfrastructureError(
                    f"{self._problem}. What is not uploaded is in {self._directory.root}: the same command continues "
                    "from there"
                )
            self._sleep(PUSH_SECONDS)

    def _report(self, problem: str | None) -> None:
        if problem is not None and self._problem is None:
            self._log(f"{problem}. Training goes on; the upload is tried again")
        elif problem is None and self._problem is not None:
            self._log(f"{self._bucket.url} can be reached again")
        self._problem = problem
